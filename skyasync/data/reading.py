"""Rows of sources that are not held: read on from any row.

| source                                   | how it is read on from row n                                        |
|------------------------------------------|---------------------------------------------------------------------|
| ``x.parquet``                            | from the row group that has it                                      |
| ``x.jsonl`` (``.json`` with lines)       | from the nearest line whose place in the file is known              |
| Hugging Face names, folders              | ``datasets`` streams them, and skips                                |
| a folder of ``save_to_disk``             | by number: it is memory-mapped                                      |
| ``module:function``, ``reasoning_gym``   | called again, and skipped; what it gives may have no end            |

Invariant: a source gives the same rows in the same order each time it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from skyasync.config.schema import Config
from skyasync.data import sources
from skyasync.data.sources import FILES, HUB, Row
from skyasync.errors import UserError

KNOWN_EVERY = 4096  # lines of a file whose places are remembered
ROWS_AT_ONCE = 256  # of a Parquet file

Read = Callable[[int], Iterator[Row]]


def reader(source: str, cfg: Config) -> Read:
    """A function of n that gives the source's rows from the n-th on.

    Raises:
        UserError: for a source that is none, or cannot be read row by row.
    """
    path = Path(source)
    if path.suffix == ".parquet":
        return _translated(source, lambda start: _parquet(sources.check_file(source), start))
    if path.suffix in FILES:
        return _translated(source, _Lines(sources.check_file(source), source).read)
    folder, _, split = source.partition(":")
    place = Path(folder).expanduser()
    if folder and not source.rpartition(":")[0].endswith(".py") and place.is_dir():
        if sources.is_saved(place):
            return lambda start: _by_number(sources.rows(source, cfg, held_out=False), start)
        return _translated(source, _Streamed(source, str(place), None, split or None).read)
    if not source.startswith(sources.TASK_SOURCE) and (found := HUB.fullmatch(source)):
        return _translated(source, _Streamed(source, found["name"], found["config"], found["split"]).read)
    return lambda start: _by_number(sources.rows(source, cfg, held_out=False), start)


def _by_number(rows: Iterable[Row], start: int) -> Iterator[Row]:
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        whole: Any = rows
        return (whole[number] for number in range(start, len(whole)))
    return islice(rows, start, None)


def _parquet(path: Path, start: int) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if start < size:
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group]):
                    yield from batch.slice(start).to_pylist() if start < len(batch) else ()
                    start = max(0, start - len(batch))
            else:
                start -= size


class _Lines:
    """A file with a JSON object per line; remembers where some of the lines begin."""

    def __init__(self, path: Path, source: str) -> None:
        self._path, self._places = path, [0]  # of the lines 0, KNOWN_EVERY, ...
        with path.open("rb") as file:
            if file.read(64).lstrip()[:1] == b"[":
                raise UserError(f"data.streaming=true: {source} is one JSON list; write it as JSON lines (.jsonl)")

    def read(self, start: int) -> Iterator[Row]:
        known = min(start // KNOWN_EVERY, len(self._places) - 1)
        number = known * KNOWN_EVERY
        with self._path.open("rb") as file:
            file.seek(self._places[known])
            while line := file.readline():
                if not line.strip():
                    continue
                if number >= start:
                    yield sources.parse_line(line, number)
                number += 1
                if number % KNOWN_EVERY == 0 and number // KNOWN_EVERY == len(self._places):
                    self._places.append(file.tell())


class _Streamed:
    """A data set as ``datasets`` streams it."""

    def __init__(self, source: str, name: str, config: str | None, split: str | None) -> None:
        self._source, self._name, self._config, self._split = source, name, config, split
        if split and "[" in split:
            raise UserError(f"data.streaming=true: {source} asks for a slice, which needs the whole: remove it")

    def read(self, start: int) -> Iterator[Row]:
        from datasets import load_dataset

        found = load_dataset(self._name, self._config, streaming=True)
        split = sources.split_among(list(map(str, found)), self._split, self._source, held_out=False)
        rows = found[split]
        return iter(rows.skip(start) if start else rows)


def _translated(source: str, read: Read) -> Read:
    """What libraries say of a source that cannot be read, as a user's error."""

    def translated(start: int) -> Iterator[Row]:
        try:
            yield from read(start)
        except (OSError, ValueError) as error:  # pyarrow's errors and those of datasets are among them
            raise UserError(f"data source {source!r} cannot be read: {error.__cause__ or error}") from error

    return translated


class Interleaved:
    """Several sources as one: each row comes from the source that has given the fewest so far, until all have ended.

    ``given`` says how far each source has been read; it decides all that follows.
    """

    def __init__(self, reads: Iterable[Read]) -> None:
        self._reads = list(reads)
        self.given: tuple[int, ...] = (0,) * len(self._reads)
        self._open: list[Iterator[Row] | None] = []

    def seek(self, given: tuple[int, ...]) -> None:
        """Go on behind what has been given; nothing to do where it stands there."""
        if given != self.given or not self._open:
            self.given, self._open = given, [read(start) for read, start in zip(self._reads, given, strict=True)]

    def take(self, count: int) -> list[Row]:
        """The next rows; fewer at the end of all sources."""
        self.seek(self.given)
        rows, given = list[Row](), list(self.given)
        living = [number for number, source in enumerate(self._open) if source is not None]
        while living and len(rows) < count:
            number = min(living, key=lambda n: (given[n], n))
            source = self._open[number]
            assert source is not None
            try:
                rows.append(next(source))
                given[number] += 1
            except StopIteration:
                self._open[number] = None
                living.remove(number)
        self.given = tuple(given)
        return rows
