"""Where rows come from.

| ``data.train_data`` / ``val_data``       | rows                                                                |
|------------------------------------------|---------------------------------------------------------------------|
| ``x.parquet``, ``x.jsonl``, ``x.json``   | the file's                                                          |
| ``folder``, ``folder:split``             | a saved data set's, or those of the parquet or JSON files inside    |
| ``owner/name#config:split``              | a Hugging Face data set's; config and split may be left out         |
| ``reasoning_gym:task``                   | procedural ones; options in ``data.reasoning_gym.task``             |
| ``module:function``, ``file.py:function``| what the function returns                                           |

Invariant: a source means one of these or is refused by name. Where a data set has several splits and none is named,
training takes ``train``, and evaluation ``validation`` or ``test``, never the training split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skyasync.config.schema import Config
from skyasync.config.schema.data import TASK_SOURCE
from skyasync.errors import UserError, nearest, unknown
from skyasync.registry import absolute_reference, resolve_reference

Row = dict[str, Any]

FILES = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(#(?P<config>[^:#]+))?(:(?P<split>.+))?")
_SPLITS = {False: ("train",), True: ("validation", "valid", "val", "test")}


def rows(source: str, cfg: Config, *, held_out: bool) -> Iterable[Row]:
    """The rows of one source.

    Args:
        cfg: a ``skyasync.config.Config``; ``data.reasoning_gym`` and ``trainer.seed`` are read.
        held_out: for evaluation.

    Raises:
        UserError: naming the source and what is wrong with it.
    """
    if source.startswith(TASK_SOURCE):
        from skyasync.rewards import reasoning

        task = source.removeprefix(TASK_SOURCE)
        return reasoning.rows(task, cfg.data.reasoning_gym.get(task, {}), cfg.trainer.seed, held_out=held_out)
    if Path(source).suffix in FILES:
        return _of_file(source)
    if source.rpartition(":")[0].endswith(".py"):
        return resolve_reference(source, kind="data source")()
    folder, _, split = source.partition(":")
    if folder and Path(folder).expanduser().is_dir():
        return _of_folder(Path(folder).expanduser(), split, source, held_out)
    if found := HUB.fullmatch(source):
        return _loaded(source, found["name"], found["config"], found["split"], held_out)
    if ":" in source:
        return resolve_reference(source, kind="data source")()
    raise UserError(
        f"data source {source!r} is neither a .parquet, .jsonl or .json file, nor a folder, a Hugging Face data set "
        f"(owner/name#config:split), reasoning_gym:task or module:function"
    )


def absolute(source: str) -> str:
    """Files and folders by their absolute path, for processes that work in another folder; others as they are."""
    place, colon, split = source.partition(":")
    path = Path(place).expanduser()
    if (place and path.is_dir()) or (path.is_file() and not colon):
        return f"{path.resolve()}{colon}{split}"
    return absolute_reference(source)


def absolute_all(sources: str | list[str]) -> list[str]:
    """The same of one source or several."""
    return [absolute(source) for source in ([sources] if isinstance(sources, str) else sources)]


def parse_line(line: bytes, number: int) -> Row:
    """A line of a JSON lines file, which should hold the row with this number; that it is an object is seen later.

    Raises:
        ValueError: naming the row.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"row {number} is not valid JSON: {error.msg} (character {error.pos})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"row {number} is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise ValueError(f"row {number} is nested too deeply") from None


def check_file(source: str) -> Path:
    """Raises ``UserError`` if there is no such file."""
    path = Path(source)
    if not path.is_file():
        close = nearest(path.name, _names_beside(path), count=1)
        raise UserError(f"data file {source!r} does not exist{f': did you mean {close[0]!r}?' if close else ''}")
    return path


def _of_file(source: str) -> Iterable[Row]:
    path = check_file(source)
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return load_dataset(FILES[path.suffix], data_files=str(path), split="train")
    except (DatasetGenerationError, ValueError) as error:
        raise UserError(f"data file {source!r} cannot be read: {error.__cause__ or error}") from error


def is_saved(folder: Path) -> bool:
    """Whether ``datasets`` has saved a data set there."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json", "state.json"))


def _of_folder(folder: Path, split: str, source: str, held_out: bool) -> Iterable[Row]:
    if not is_saved(folder):
        return _loaded(source, str(folder), None, split or None, held_out)
    from datasets import Dataset, load_from_disk

    found = load_from_disk(str(folder))
    return found if isinstance(found, Dataset) else found[split_among(list(found), split, source, held_out)]


def _loaded(source: str, name: str, config: str | None, split: str | None, held_out: bool) -> Iterable[Row]:
    """``datasets.load_dataset`` for a name on the hub, or a folder in the form of one."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        if split and "[" in split:  # a slice: train[:100]
            return load_dataset(name, config, split=split)
        found = load_dataset(name, config)
    except (DatasetGenerationError, ValueError, OSError) as error:  # also: no such data set, hub out of reach
        raise UserError(f"data source {source!r} cannot be loaded: {error.__cause__ or error}") from error
    return found[split_among(list(map(str, found)), split, source, held_out)]


def split_among(splits: list[str], wanted: str | None, source: str, held_out: bool) -> str:
    """The split that is meant; see the module's invariant."""
    if wanted:
        if wanted not in splits:
            raise UserError(f"data source {source!r}: {unknown('split', wanted, splits)}")
        return wanted
    usual = [split for split in _SPLITS[held_out] if split in splits]
    if not usual and len(splits) > 1:
        raise UserError(f"data source {source!r} has the splits {', '.join(splits)}: write {source}:SPLIT")
    return (usual or splits)[0]


def _names_beside(path: Path) -> list[str]:
    return [file.name for file in path.parent.glob("*") if file.suffix in FILES]
