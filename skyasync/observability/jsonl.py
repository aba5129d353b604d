"""Files with one JSON object per line and a ``step`` in each.

Invariant: what a reader gets is a prefix of what was written; a line torn by a crash is left out,
and the next writer removes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
AnyRow = TypeVar("AnyRow", bound=Mapping[str, Any])


def encode(row: Row) -> str:
    """One line of strict JSON.

    An object that JSON does not know becomes its text, half a surrogate pair becomes "?".

    Raises:
        ValueError: for NaN and infinities, which no strict reader accepts.
    """
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    return text.encode(errors="replace").decode()


def read_rows(path: Path | str) -> list[Row]:
    """All complete rows, in the file's order; none if the file does not exist."""
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    # Only a line feed ends a line: JSON leaves other separators (U+2028, U+0085) as they are.
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # torn by a crash
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def rows_with(rows: Iterable[AnyRow], name: str) -> list[AnyRow]:
    """The rows in which the metric was logged and finite."""
    return [row for row in rows if row.get(name) is not None]


def values_of(rows: Iterable[AnyRow], name: str) -> list[float]:
    """The finite values of a metric, in the order of the rows."""
    return [float(row[name]) for row in rows_with(rows, name)]


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replace the file in one move: a reader sees all of the old rows or all of the new ones."""
    replace_text(path, "".join(map(encode, rows)))


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a crash leaves either the old or the new content."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)  # a full disk needs the space
        raise


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to the file: all of them, or, if the disk does not take them, none."""
    with path.open("ab", buffering=0) as file:
        old_size = file.tell()
        try:
            written = 0
            data = "".join(map(encode, rows)).encode()
            while written < len(data):  # an unbuffered write may take a part
                written += file.write(data[written:])
        except OSError:
            file.truncate(old_size)
            raise
