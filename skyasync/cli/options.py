"""Options of a subcommand: ``--name value``, ``--name=value`` and ``--flag``; what is left are settings and names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from skyasync.errors import UserError, nearest

SETTINGS = ("--config", "--help", "-h")  # which the configuration's own loader reads


def take(
    argv: Sequence[str], values: Mapping[str, str], flags: Collection[str] = (), *, settings: bool = False
) -> tuple[dict[str, str], list[str]]:
    """The options by their names (a flag's value is ""), and the arguments that are left, in order.

    Args:
        values: options that have a value, each with an example of one.
        settings: what is left is for the configuration's loader, whose options stay.

    Raises:
        UserError: for an unknown option, with the nearest one, or for one without its value.
    """
    given: dict[str, str] = {}
    rest, arguments = [], list(argv)
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.partition("=")
        if name in values:
            if not equals and not arguments:
                raise UserError(f"{name} needs a value: {name} {values[name]}")
            given[name] = value if equals else arguments.pop(0)
        elif name in flags and not equals:
            given[name] = ""
        elif settings and (name in SETTINGS or not name.startswith("-")):
            rest.append(argument)
            if argument in SETTINGS and arguments:
                rest.append(arguments.pop(0))
        elif name.startswith("-"):
            known = [*values, *flags]
            close = nearest(name, known, count=1)
            raise UserError(f"unknown option {name}: " + (f"did you mean {close[0]}?" if close else ", ".join(known)))
        else:
            rest.append(argument)
    return given, rest


def number(text: str, option: str, least: int = 1) -> int:
    """Raises ``UserError`` for what is no whole number of at least ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{option} {text}: not a whole number of at least {least}")
    return int(text)
