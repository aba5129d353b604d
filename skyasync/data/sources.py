"""Sources of rows: loaded at once, or read one by one from any row on (``data.streaming``).

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
OFFSET_INTERVAL = 4096  # lines from one whose offset is recorded to the next
ROWS_AT_ONCE = 256  # of a Parquet file: long rows of a row group need not be in memory together
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
        options = cfg.data.reasoning_gym.get(task, {})
        return reasoning.rows(task, options, cfg.trainer.seed, evaluation=is_eval)
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

            dataset = load_from_disk(str(folder))
            if isinstance(dataset, Dataset):
                return dataset
            return dataset[split_among(list(dataset), split, source, is_eval)]
        name = str(folder)
    else:
        hub = HUB.fullmatch(source)
        if hub:
            name, config, split = hub.group("name", "config", "split")
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
    except (DatasetGenerationError, ValueError, OSError) as error:
        # Also if there is no such data set, or the hub is out of reach.
        raise UserError(
            f"data source {source!r} cannot be loaded: {error.__cause__ or error}"
        ) from error
    return splits[split_among(list(map(str, splits)), split, source, is_eval)]


def absolute(source: str) -> str:
    """A source for processes with another working directory: files by their absolute paths."""
    name, colon, split = source.partition(":")
    path = Path(name).expanduser()
    if (name and path.is_dir()) or (path.is_file() and not colon):
        return f"{path.resolve()}{colon}{split}"
    return absolute_reference(source)


def absolute_all(sources: str | list[str]) -> list[str]:
    """``absolute`` of one source or several."""
    if isinstance(sources, str):
        sources = [sources]
    return list(map(absolute, sources))


def parse_line(line: bytes, number: int) -> Row:
    """Parse a line of a JSON lines file; whether it is an object is checked later.

    Args:
        number: of the row, for messages.

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
        files = [file.name for file in path.parent.glob("*") if file.suffix in FILES]
        suggestions = nearest(path.name, files, count=1)
        hint = f": did you mean {suggestions[0]!r}?" if suggestions else ""
        raise UserError(f"data file {source!r} does not exist{hint}")
    return path


def _is_of_a_server(path: Path) -> bool:
    """Whether a file has rows of NeMo Gym, whose servers read them again."""
    # ``datasets`` would add to each row the entries of the others.
    with path.open("rb") as file:
        return b'"responses_create_params"' in file.readline()


def is_saved(folder: Path) -> bool:
    """Whether ``datasets`` has saved a data set there."""
    files = ("dataset_dict.json", "dataset_info.json", "state.json")
    return any((folder / name).is_file() for name in files)


def split_among(splits: list[str], name: str | None, source: str, is_eval: bool) -> str:
    """The split that is named, or the usual one."""
    if name:
        if name not in splits:
            raise UserError(f"data source {source!r}: {unknown('split', name, splits)}")
        return name
    for usual in _SPLITS[is_eval]:
        if usual in splits:
            return usual
    if len(splits) > 1:
        raise UserError(
            f"data source {source!r} has the splits {', '.join(splits)}: write {source}:SPLIT"
        )
    return splits[0]


# ---------------------------------------------------------------- row by row


def reader(source: str, cfg: Config) -> Read:
    """A reader of a source from any row on, which does not load it.

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
            beginning = file.read(64).lstrip()
        if beginning.startswith(b"["):
            raise UserError(
                f"data.streaming=true: {source} is one JSON list; write it as JSON lines (.jsonl)"
            )
        return partial(_translated, source, partial(_json_lines, path, [0]))
    name, _, part = source.partition(":")
    folder = Path(name).expanduser()
    config = None
    split = part or None
    is_function = source.rpartition(":")[0].endswith(".py")
    is_folder = bool(name) and not is_function and folder.is_dir()
    hub = None
    if not is_folder and not source.startswith(TASK_SOURCE):
        hub = HUB.fullmatch(source)
    if hub:
        name, config, split = hub.group("name", "config", "split")
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
    """Rows with numbers: a list or a data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


def _from_row(source: str, cfg: Config, start: int) -> Iterator[Row]:
    source_rows = rows(source, cfg, is_eval=False)
    if isinstance(source_rows, _Indexed):
        return (source_rows[number] for number in range(start, len(source_rows)))
    return islice(source_rows, start, None)


def _parquet(path: Path, start: int) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if start < size:
                for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group]):
                    if start < len(batch):
                        yield from batch.slice(start).to_pylist()
                    start = max(0, start - len(batch))
            else:
                start -= size  # from here on ``start`` counts the rows of the groups that follow


def _json_lines(path: Path, offsets: list[int], start: int) -> Iterator[Row]:
    """The rows of a JSON lines file from ``start`` on.

    Args:
        offsets: of the lines 0, ``OFFSET_INTERVAL``, ..., as far as they have been read. The reader
            extends them.
    """
    index = min(start // OFFSET_INTERVAL, len(offsets) - 1)
    number = index * OFFSET_INTERVAL
    with path.open("rb") as file:
        file.seek(offsets[index])
        # Not by iteration, after which a file does not give its position.
        while line := file.readline():
            if not line.strip():  # blank lines have no number
                continue
            if number >= start:
                yield parse_line(line, number)
            number += 1
            if number % OFFSET_INTERVAL == 0 and number // OFFSET_INTERVAL == len(offsets):
                offsets.append(file.tell())


def _streamed(
    source: str, name: str, config: str | None, split: str | None, start: int
) -> Iterator[Row]:
    """A data set as ``datasets`` streams it."""
    from datasets import load_dataset

    splits = load_dataset(name, config, streaming=True)
    split_name = split_among(list(map(str, splits)), split, source, is_eval=False)
    rows = splits[split_name]
    if start:
        rows = rows.skip(start)
    return iter(rows)


def _translated(source: str, read: Read, start: int) -> Iterator[Row]:
    """The rows of a source; errors of libraries that read it are raised as ``UserError``."""
    try:
        yield from read(start)
    except (OSError, ValueError) as error:  # the errors of pyarrow and datasets are subclasses
        raise UserError(
            f"data source {source!r} cannot be read: {error.__cause__ or error}"
        ) from error


class InterleavedSources:
    """Several sources as one: the next row is of the source with the fewest rows so far.

    Attributes:
        rows_read: of each source. They alone decide the rows that follow.
    """

    def __init__(self, reads: Iterable[Read]) -> None:
        self._reads = list(reads)
        self.rows_read: tuple[int, ...] = (0,) * len(self._reads)
        self._iterators: list[Iterator[Row] | None] = []

    def seek(self, rows_read: tuple[int, ...]) -> None:
        """Continue after these numbers of rows."""
        # Sources that stand there already stay open.
        if rows_read != self.rows_read or not self._iterators:
            self._iterators = [
                read(start) for read, start in zip(self._reads, rows_read, strict=True)
            ]
            self.rows_read = rows_read

    def take(self, count: int) -> list[Row]:
        """The next rows; fewer at the end of all sources."""
        self.seek(self.rows_read)
        rows = list[Row]()
        rows_read = list(self.rows_read)
        open_sources = {
            number: source for number, source in enumerate(self._iterators) if source is not None
        }
        while open_sources and len(rows) < count:
            # Of sources with equally many rows the first one: their numbers are in order.
            number = min(open_sources, key=rows_read.__getitem__)
            try:
                rows.append(next(open_sources[number]))
                rows_read[number] += 1
            except StopIteration:
                self._iterators[number] = None
                del open_sources[number]
        self.rows_read = tuple(rows_read)
        return rows
