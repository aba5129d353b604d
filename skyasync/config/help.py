"""``--help``: every key with its type, default, allowed values and sentence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from omegaconf import MISSING
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from skyasync.config.command_line import nearest_keys
from skyasync.config.keys import Key, Keys
from skyasync.config.values import type_name, written
from skyasync.errors import UserError, nearest

_USAGE = "usage: [--config FILE.yaml] [--help [GROUP]] [key=value ...]"
_RULES = (
    "Values are typed: 1e-6, true, null, [a,b]. Later --config files win over earlier ones, key=value over both. "
    "--help GROUP shows one group or key."
)


def print_help(keys: Keys, topic: str = "", console: Console | None = None) -> None:
    """Print all keys, or those of the group (or the one key) that ``topic`` names.

    Raises:
        UserError: if there is no such group or key.
    """
    shown = [keys[topic]] if topic in keys else keys.within(topic)
    if not shown:
        close = nearest(topic, keys.groups, count=1) or nearest_keys(topic, keys)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        groups = ", ".join(group for group in keys.groups if "." not in group)
        raise UserError(f"--help {topic}: no such group or key: {hint}groups: {groups}")
    console = console or Console(highlight=False)
    if not topic:
        console.print(Text(_USAGE, style="bold"))
        console.print(Text(_RULES))
    group = None
    for key in shown:
        if key.group != group:
            group = key.group
            console.print()
            console.print(Text(group, style="bold underline"))
        _print_key(key, console)


def _print_key(key: Key, console: Console) -> None:
    head = Text.assemble(
        (key.path, "bold cyan"), (f"  {type_name(key.type)}", "green"), ("  " + default_text(key), "yellow")
    )
    console.print(Padding(head, (0, 0, 0, 2), expand=False))
    console.print(Padding(Text(" ".join(filter(None, (key.doc, allowed_text(key))))), (0, 0, 0, 6), expand=False))


def default_text(key: Key) -> str:
    """The default as one would write it after the ``=``, or "required"."""
    return "required" if key.default == MISSING else f"= {written(key.default)}"


def allowed_text(key: Key) -> str:
    """Which values are allowed beyond the type, and when they are read, in sentences; "" if all are, and always."""
    return " ".join(filter(None, (_values_text(key), f"Read with {key.when}." if key.when else "")))


def _values_text(key: Key) -> str:
    options: Iterable[Any]
    try:
        options = key.options()
    except UserError:  # help does not fail because a part is broken
        options = key.choices
    if options:
        other = ", or module:attribute" if key.registry and key.open_ended else ""
        return f"One of: {', '.join(map(written, options))}{other}."
    bounds = key.bounds()
    return f"{bounds[0].upper()}{bounds[1:]}." if bounds else ""
