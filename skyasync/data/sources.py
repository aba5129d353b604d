"""Where rows come from: loaded whole, or read one by one from any row on (``data.streaming``).

| ``data.train_data`` / ``val_data``       | rows                                                                |
|------------------------------------------|---------------------------------------------------------------------|
| ``x.parquet``, ``x.jsonl``, ``x.json``   | the file's                                                          |
| ``folder``, ``folder:split``             | a saved data set's, or those of the parquet or JSON files inside    |
| ``owner/name#config:split``              | a Hugging Face data set's; config and split may be left out         |
| ``reasoning_gym:task``                   | procedural ones; options in ``data.reasoning_gym.task``             |
| ``module:function``, ``file.py:function``| what the function returns                                           |

Invariant: a source is one of these or raises an error. If a data set has several splits and none is
named, training takes ``train``, and evaluation ``validation`` or ``test``, never the training
split. A source gives the same rows in the same order each time it is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from skyasync.config.schema import Config
from skyasync.config.schema.data import TASK_SOURCE
from skyasync.errors import UserError, nearest, unknown
from skyasync.registry import absolute_reference, resolve_reference

Row = dict[str, Any]
Read = Callable[[int], Iterator[Row]]  # the rows of a source from a number on

FILES = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(#(?P<config>[^:#]+))?(:(?P<split>.+))?")
KNOWN_EVERY = 4096  # lines of a file whose offsets are kept
ROWS_AT_ONCE = 256  # of a Parquet file
_SPLITS = {False: ("train",), True: ("validation", "valid", "val", "test")}


def rows(source: str, cfg: Config, *, is_eval: bool) -> Iterable[Row]:
    """The rows of one source.

    Args:
        cfg: ``data.reasoning_gym`` and ``trainer.seed`` are read.
        is_eval: for evaluation.

    Raises:
        UserError: naming the source and what is wrong with it.
    """
    if source.startswith(TASK_SOURCE):
        from skyasync.rewards import reasoning

        task = source.removeprefix(TASK_SOURCE)
        return reasoning.rows(
            task, cfg.data.reasoning_gym.get(task, {}), cfg.trainer.seed, evaluation=is_eval
        )
    suffix = Path(source).suffix
    if suffix in FILES:
        path = check_file(source)
        if suffix == ".jsonl" and _is_of_a_server(path):
            return list(_translated(source, partial(_json_lines, path, [0]), 0))
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError

        try:
            return load_dataset(FILES[suffix], data_files=str(path), split="train")
        except (DatasetGenerationError, ValueError) as error:
            raise UserError(
                f"data file {source!r} cannot be read: {error.__cause__ or error}"
            ) from error
    if source.rpartition(":")[0].endswith(".py"):
        return resolve_reference(source, kind="data source")()
    name, _, part = source.partition(":")
    folder = Path(name).expanduser()
    config = None
    split = part or None
    if name and folder.is_dir():
        if is_saved(folder):
            from datasets import Dataset, load_from_disk

            saved = load_from_disk(str(folder))
            if isinstance(saved, Dataset):
                return saved
            return saved[split_among(list(saved), split, source, is_eval)]
        name = str(folder)
    elif hub := HUB.fullmatch(source):
        name = hub["name"]
        config = hub["config"]
        split = hub["split"]
    elif ":" in source:
        return resolve_reference(source, kind="data source")()
    else:
        raise UserError(
            f"data source {source!r} is neither a .parquet, .jsonl or .json file, nor a folder, a Hugging Face data "
            f"set (owner/name#config:split), reasoning_gym:task or module:function"
        )
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        if split and "[" in split:  # a slice: train[:100]
            return load_dataset(name, config, split=split)
        splits = load_dataset(name, config)
    except (
        DatasetGenerationError,
        ValueError,
        OSError,
    ) as error:  # also: no such data set, hub out of reach
        raise UserError(
            f"data source {source!r} cannot be loaded: {error.__cause__ or error}"
        ) from error
    return splits[split_among(list(map(str, splits)), split, source, is_eval)]


def absolute(source: str) -> str:
    """Files and folders by their absolute path, for processes with another working directory;
    others as they are."""
    place, colon, split = source.partition(":")
    path = Path(place).expanduser()
    if (place and path.is_dir()) or (path.is_file() and not colon):
        return f"{path.resolve()}{colon}{split}"
    return absolute_reference(source)


def absolute_all(sources: str | list[str]) -> list[str]:
    """``absolute`` of one source or several."""
    return [absolute(source) for source in ([sources] if isinstance(sources, str) else sources)]


def parse_line(line: bytes, number: int) -> Row:
    """A line of a JSON lines file, the row with this number; that it is an object is checked later.

    Raises:
        ValueError: naming the row.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"row {number} is not valid JSON: {error.msg} (character {error.pos})"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"row {number} is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise ValueError(f"row {number} is nested too deeply") from None


def check_file(source: str) -> Path:
    """Raises ``UserError`` if there is no such file."""
    path = Path(source)
    if not path.is_file():
        close = nearest(
            path.name,
            [file.name for file in path.parent.glob("*") if file.suffix in FILES],
            count=1,
        )
        raise UserError(
            f"data file {source!r} does not exist{f': did you mean {close[0]!r}?' if close else ''}"
        )
    return path


def _is_of_a_server(path: Path) -> bool:
    """Whether it is data of NeMo Gym. Its servers read the rows again, to which ``datasets`` adds
    entries of others."""
    with path.open("rb") as file:
        return b'"responses_create_params"' in file.readline()


def is_saved(folder: Path) -> bool:
    """Whether ``datasets`` has saved a data set there."""
    return any(
        (folder / name).is_file()
        for name in ("dataset_dict.json", "dataset_info.json", "state.json")
    )


def split_among(splits: list[str], name: str | None, source: str, is_eval: bool) -> str:
    """The split that is named, or the usual one."""
    if name:
        if name not in splits:
            raise UserError(f"data source {source!r}: {unknown('split', name, splits)}")
        return name
    usual = [split for split in _SPLITS[is_eval] if split in splits]
    if not usual and len(splits) > 1:
        raise UserError(
            f"data source {source!r} has the splits {', '.join(splits)}: write {source}:SPLIT"
        )
    return (usual or splits)[0]


# ---------------------------------------------------------------- row by row


def reader(source: str, cfg: Config) -> Read:
    """Reads a source from any row on without loading it.

    Parquet files start at the row group, JSON lines at the nearest line whose offset is known,
    folders of ``save_to_disk`` by number. ``datasets`` streams other data sets and skips; functions
    are called again and skip, and may have no end.

    Raises:
        UserError: for a source that is none, or cannot be read row by row.
    """
    suffix = Path(source).suffix
    if suffix == ".parquet":
        return partial(_translated, source, partial(_parquet, check_file(source)))
    if suffix in FILES:
        path = check_file(source)
        with path.open("rb") as file:
            if file.read(64).lstrip()[:1] == b"[":
                raise UserError(
                    f"data.streaming=true: {source} is one JSON list; write it as JSON lines (.jsonl)"
                )
        return partial(_translated, source, partial(_json_lines, path, [0]))
    name, _, part = source.partition(":")
    folder = Path(name).expanduser()
    config = None
    split = part or None
    is_folder = bool(name) and not source.rpartition(":")[0].endswith(".py") and folder.is_dir()
    if is_folder or source.startswith(TASK_SOURCE):
        hub = None
    else:
        hub = HUB.fullmatch(source)
    if hub:
        name = hub["name"]
        config = hub["config"]
        split = hub["split"]
    elif is_folder and not is_saved(folder):
        name = str(folder)
    else:
        return partial(_from_row, source, cfg)
    if split and "[" in split:
        raise UserError(
            f"data.streaming=true: {source} asks for a slice, which needs the whole: remove it"
        )
    return partial(_translated, source, partial(_streamed, source, name, config, split))


@runtime_checkable
class _Indexed(Protocol):
    """Rows that are read by their numbers: a list or a data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


def _from_row(source: str, cfg: Config, start: int) -> Iterator[Row]:
    whole = rows(source, cfg, is_eval=False)
    if isinstance(whole, _Indexed):
        return (whole[number] for number in range(start, len(whole)))
    return islice(whole, start, None)


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


def _json_lines(path: Path, offsets: list[int], start: int) -> Iterator[Row]:
    """``offsets``: of the lines 0, ``KNOWN_EVERY``, ..., as far as they have been read; extended
    here."""
    known = min(start // KNOWN_EVERY, len(offsets) - 1)
    number = known * KNOWN_EVERY
    with path.open("rb") as file:
        file.seek(offsets[known])
        while line := file.readline():
            if not line.strip():
                continue
            if number >= start:
                yield parse_line(line, number)
            number += 1
            if number % KNOWN_EVERY == 0 and number // KNOWN_EVERY == len(offsets):
                offsets.append(file.tell())


def _streamed(
    source: str, name: str, config: str | None, split: str | None, start: int
) -> Iterator[Row]:
    """A data set as ``datasets`` streams it."""
    from datasets import load_dataset

    splits = load_dataset(name, config, streaming=True)
    rows = splits[split_among(list(map(str, splits)), split, source, is_eval=False)]
    return iter(rows.skip(start) if start else rows)


def _translated(source: str, read: Read, start: int) -> Iterator[Row]:
    """Raises a library's error about a source that cannot be read as the user's error."""
    try:
        yield from read(start)
    except (OSError, ValueError) as error:  # pyarrow's errors and those of datasets are among them
        raise UserError(
            f"data source {source!r} cannot be read: {error.__cause__ or error}"
        ) from error


class InterleavedSources:
    """Several sources as one: the next row is of the source with the fewest rows so far, until all
    have ended.

    ``given``: rows read of each source, which decide all that follow.
    """

    def __init__(self, reads: Iterable[Read]) -> None:
        self._reads = list(reads)
        self.given: tuple[int, ...] = (0,) * len(self._reads)
        self._open: list[Iterator[Row] | None] = []

    def seek(self, given: tuple[int, ...]) -> None:
        """Continue after these numbers of rows."""
        if given != self.given or not self._open:
            self.given, self._open = (
                given,
                [read(start) for read, start in zip(self._reads, given, strict=True)],
            )

    def take(self, count: int) -> list[Row]:
        """The next rows; fewer at the end of all"""
        self.seek(self.given)
        rows = list[Row]()
        given = list(self.given)
        open_sources = [number for number, source in enumerate(self._open) if source is not None]
        while open_sources and len(rows) < count:
            number = min(open_sources, key=lambda n: (given[n], n))
            source = self._open[number]
            assert source is not None
            try:
                rows.append(next(source))
                given[number] += 1
            except StopIteration:
                self._open[number] = None
                open_sources.remove(number)
        self.given = tuple(given)
        return rows
