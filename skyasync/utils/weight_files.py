"""Safetensors files that may be damaged or of unknown origin: the reader's errors become one line.

Invariant: reading a file runs no code of it, and takes no more memory than the size of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from skyasync.errors import UserError, headline

INDEX = "model.safetensors.index.json"
#: Errors of readers for files whose names, shapes or metadata do not fit together.
_MISFITS = (
    SafetensorError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


def check_weight_files(files: Iterable[Path]) -> None:
    """Check the headers of files.

    Raises:
        UserError: for the first file that is damaged.
    """
    for file in files:
        try:
            with safe_open(str(file), "np"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is damaged, or no safetensors file: {headline(error)}"
            ) from error


def check_model_files(folder: Path) -> None:
    """Check the files that transformers reads of a model's folder.

    Other files, such as ``consolidated.safetensors``, may be anything.

    Raises:
        UserError: for the first file that is damaged, or is missing although the index names it.
    """
    single = folder / "model.safetensors"
    index = folder / INDEX
    if single.is_file():
        check_weight_files([single])
        return
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is damaged, or no index of weights: {headline(error)}") from error
    files = [folder / str(name) for name in sorted(names, key=str)]
    for file in files:
        if not file.is_file():
            raise UserError(f"{index} names {file.name}, which is not in the folder")
    check_weight_files(files)


@contextmanager
def weights_of(folder: Path) -> Iterator[None]:
    """Turn the errors of a block that reads the weights of a folder into one line.

    Raises:
        UserError: for a file that is damaged, or whose tensors do not fit the model.
    """
    check_weight_files(sorted(folder.glob("*.safetensors")))
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A BaseException, unlike its name.
        from torch.distributed.checkpoint.api import CheckpointException

        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:
            first_failure = next(iter(error.failures.values()))
            cause = first_failure[0]  # without its traceback
        elif not isinstance(error, _MISFITS):
            raise
        problem = "its weights are damaged, or do not fit the model"
        raise UserError(f"{folder} cannot be read: {problem}: {headline(cause)}") from error
