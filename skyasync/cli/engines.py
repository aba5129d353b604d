"""``skyasync engines``: engines that join a run, or leave it, while it goes on.

Invariant: it changes one file in the run's folder, which the run reads; a name that the run could
not use is rejected here, and nothing is written then.
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
    """Raises ``UserError`` for a run that does not go on, and for names that do not fit."""
    file = Path(argv[0]).expanduser() / FILE
    what = [*argv[1:], "list"][0]
    names = list(argv[2:])
    if not file.is_file():
        why = f"{file.parent} is not a run's folder"
        if file.parent.is_dir():
            ended = "it has ended, or its engines cannot change (docs/elastic_engines.md)"
            why = f"the engines of this run cannot be changed: {ended}"
        raise UserError(f"{file} is not there: {why}")
    there = read_engine_list(file.read_text(encoding="utf-8"))
    if what not in ("list", "add", "remove"):
        raise UserError(f"skyasync engines: {what!r} is none of list, add, remove")
    if what != "list":
        there = _changed(there, what, [name.rstrip("/") for name in names])
        write_engine_list(file, there)
    print("\n".join(there))


def _changed(there: list[str], what: str, names: list[str]) -> list[str]:
    servers = any(map(is_server, there))
    if what == "remove":
        if not names:
            raise UserError(
                "skyasync engines RUN remove needs the names of the engines to remove: remove NAME ..."
            )
        for name in names:
            if name not in there:
                raise UserError(f"skyasync engines: there is no {name} among {', '.join(there)}")
        left = [name for name in there if name not in names]
        if not left:
            raise UserError("skyasync engines: one engine must stay")
        return left
    if not names:
        if servers:
            raise UserError(
                "skyasync engines RUN add needs the address of a server, http://host:port"
            )
        names = [str(max((int(name) for name in there if name.isdigit()), default=-1) + 1)]
    for name in names:
        problem = wrong_name(name, servers=servers)
        if problem:
            raise UserError(f"skyasync engines: {problem}")
        if name in there:
            raise UserError(f"skyasync engines: engine {name} is already part of the run")
    return there + names
