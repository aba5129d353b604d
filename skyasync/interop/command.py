"""``python -m skyasync translate``: the arguments, and what is printed."""

from __future__ import annotations

from collections.abc import Sequence

from skyasync.errors import UserError, unknown
from skyasync.interop.recipe import detect, read_recipe
from skyasync.interop.system import systems
from skyasync.interop.translation import translated

HELP = f"""\
usage: python -m skyasync translate [--from SYSTEM] FILE ... [FLAGS]

Prints the recipe of another system as our configuration, with a comment for each key that has no counterpart.
FILE is a shell script, a YAML file or (TRL) a Python program; FLAGS are theirs: --flag value, key=value. Nothing of
it is run. SYSTEM is one of {", ".join(systems())}; without it the keys decide.

    python -m skyasync translate run.sh > ours.yaml
    python -m skyasync plan --config ours.yaml
"""


def translate(argv: Sequence[str]) -> None:
    """Print the translation.

    Raises:
        UserError: for an unreadable recipe or an unknown system.
    """
    arguments = list(argv)
    if not arguments or arguments[0] in ("--help", "-h"):
        print(HELP, end="")
        return
    name = _option(arguments)
    recipe = read_recipe(arguments)
    print(translated(recipe, name or detect(recipe)), end="")


def _option(arguments: list[str]) -> str:
    """Takes ``--from SYSTEM`` out of the arguments."""
    for at, argument in enumerate(arguments):
        option, equals, name = argument.partition("=")
        if option != "--from":
            continue
        if not equals and at + 1 < len(arguments):
            name = arguments.pop(at + 1)
        arguments.pop(at)
        if not name:
            raise UserError(f"--from needs a system: {', '.join(systems())}")
        if name.lower() not in systems():
            raise UserError(unknown("system", name, systems()))
        return name.lower()
    return ""
