"""The file in a run's folder that says which engines there shall be, one a line.

Invariant: whoever reads it while it is written finds the one or the other. Imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

FILE = "engines.txt"
HEAD = "# The engines of this run, one a line: one that is added joins, one that is taken away leaves.\n"
_OWN = re.compile(r"\w[\w.-]*")


def read(text: str) -> list[str]:
    """The names in a file, each once."""
    lines = (line.partition("#")[0].strip().rstrip("/") for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if line))


def write(file: Path, names: Sequence[str]) -> None:
    """All at once: who reads it meanwhile finds the one or the other."""
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text(HEAD + "".join(f"{name}\n" for name in names), encoding="utf-8")
    unfinished.replace(file)


def is_server(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def wrong_name(name: str, *, servers: bool) -> str:
    """What is wrong with a newcomer's name; empty if nothing is."""
    if servers and not is_server(name):
        return f"{name!r} is not the address of a server, as the run's engines are (http://host:port)"
    if not servers and (is_server(name) or not _OWN.fullmatch(name)):
        return f"{name!r} is not the number of an engine: this run starts its engines itself"
    return ""
