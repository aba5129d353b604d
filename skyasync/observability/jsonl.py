"""Files with one JSON object per line and a ``step`` in each.

Invariant: what a reader gets is a prefix of what was written; a line torn by a crash is left out,
and the next writer removes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def encode(row: Row) -> str:
    """One line of strict JSON; objects that JSON does not know become their text, and half a
    surrogate pair "?".

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
    with path.open(
        encoding="utf-8", errors="replace", newline="\n"
    ) as lines:  # JSON leaves U+2028, U+0085 as they are
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


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
        scratch.unlink(missing_ok=True)  # of a full disk's space
        raise


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to the file: all of them, or, if the disk does not take them, none."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            written = 0
            data = "".join(map(encode, rows)).encode()
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            file.truncate(before)
            raise
