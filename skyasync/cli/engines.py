"""``skyasync engines``: engines that join or leave a run while it continues.

Invariant: it changes one file in the run's folder, which the run reads. A name that the run could
not use is rejected, and nothing is written then.
"""

from __future__ import annotations

from pathlib import Path

from skyasync.cli.commands import Arguments
from skyasync.errors import UserError
from skyasync.inference.elastic import (
    FILE,
    is_server,
    read_engine_list,
    write_engine_list,
    wrong_name,
)

HELP = """\
usage: skyasync engines RUN                      list the engines of a running run
       skyasync engines RUN add [NAME ...]       add one engine, or the named ones
       skyasync engines RUN remove NAME ...      remove engines; their requests continue on the others

RUN is the folder of a running run. NAME is the number of an engine, or with generator.engines the address of a server,
http://host:port. The command edits RUN/engines.txt.
"""


def engines(argv: Arguments) -> None:
    """List or change the engines of a run.

    Raises:
        UserError: for a run that has ended, and for names that it could not use.
    """
    file = Path(argv[0]).expanduser() / FILE
    action = argv[1] if len(argv) > 1 else "list"
    names = [name.rstrip("/") for name in argv[2:]]
    if not file.is_file():  # a run writes it at its start, and removes it at its end
        reason = f"{file.parent} is not a run's folder"
        if file.parent.is_dir():
            cause = "it has ended, or its engines cannot change (docs/elastic_engines.md)"
            reason = f"the engines of this run cannot be changed: {cause}"
        raise UserError(f"{file} is not there: {reason}")
    listed_engines = read_engine_list(file.read_text(encoding="utf-8"))
    if action not in ("list", "add", "remove"):
        raise UserError(f"skyasync engines: {action!r} is none of list, add, remove")
    if action == "remove":
        listed_engines = _without(listed_engines, names)
    elif action == "add":
        listed_engines = _with(listed_engines, names)
    if action != "list":
        write_engine_list(file, listed_engines)
    print("\n".join(listed_engines))


def _without(listed_engines: list[str], names: list[str]) -> list[str]:
    """The list without some engines."""
    if not names:
        raise UserError(
            "skyasync engines RUN remove needs the names of the engines to remove: remove NAME ..."
        )
    for name in names:
        if name not in listed_engines:
            known_names = ", ".join(listed_engines)
            raise UserError(f"skyasync engines: there is no {name} among {known_names}")
    remaining = [name for name in listed_engines if name not in names]
    if not remaining:  # requests would wait for ever
        raise UserError("skyasync engines: one engine must stay")
    return remaining


def _with(listed_engines: list[str], names: list[str]) -> list[str]:
    """The list with more engines; without names, with one of the next number."""
    servers = any(map(is_server, listed_engines))
    if not names:
        if servers:  # the run cannot start another one
            raise UserError(
                "skyasync engines RUN add needs the address of a server, http://host:port"
            )
        numbers = [int(name) for name in listed_engines if name.isdigit()]
        names = [str(max(numbers, default=-1) + 1)]
    for name in names:
        problem = wrong_name(name, servers=servers)
        if problem:
            raise UserError(f"skyasync engines: {problem}")
        if name in listed_engines:
            raise UserError(f"skyasync engines: engine {name} is already part of the run")
    return listed_engines + names
