"""``--help``: every key with its type, default, allowed values and sentence."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from skyasync.config.command_line import nearest_keys
from skyasync.config.keys import MISSING, Key, Keys
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
    shown = [key for key in keys if not topic or key.path == topic or key.path.startswith(f"{topic}.")]
    if not shown:
        close = nearest(topic, keys.groups, count=1) or nearest_keys(topic, keys)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        groups = ", ".join(group for group in keys.groups if "." not in group)
        raise UserError(f"--help {topic}: no such group or key: {hint}groups: {groups}")
    console = console or Console(highlight=False)
    if not topic:
        console.print(Text(_USAGE, style="bold"))
        console.print(Text(_RULES))
    for group, members in groupby(shown, key=lambda key: key.group):
        console.print()
        console.print(Text(group, style="bold underline"))
        for key in members:
            default = "required" if key.default == MISSING else f"= {written(key.default)}"
            head = [(key.path, "bold cyan"), (f"  {type_name(key.type)}", "green"), (f"  {default}", "yellow")]
            console.print(Padding(Text.assemble(*head), (0, 0, 0, 2), expand=False))
            console.print(Padding(Text(meaning(key)), (0, 0, 0, 6), expand=False))


def meaning(key: Key) -> str:
    """A key's sentences: what it is, which values are allowed beyond the type, and when it is read."""
    try:
        options = key.options()
    except UserError:  # help does not fail because a part is broken
        options = list(key.choices)
    allowed = ""
    if options:
        other = ", or module:attribute" if key.registry and key.open_ended else ""
        allowed = f"One of: {', '.join(map(written, options))}{other}."
    elif bounds := key.bounds():
        allowed = f"{bounds[0].upper()}{bounds[1:]}."
    return " ".join(filter(None, (key.doc, allowed, f"Read with {key.when}." if key.when else "")))
