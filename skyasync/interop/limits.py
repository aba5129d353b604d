"""Limits for recipes, which are not trusted: their size, and the work of reading them."""

from __future__ import annotations

from pathlib import Path

from skyasync.config.values import Value
from skyasync.errors import UserError

#: Bytes of a script, a YAML file or a program: the largest published ones have 60 KB.
LARGEST_FILE = 512 * 1024
LARGEST_NOTEBOOK = 32 * 1024 * 1024  # bytes, most of them pictures
LONGEST_VALUE = 65_536  # characters of a value whose references are replaced
MOST_KEYS = 5_000  # of a recipe: all settings of the largest framework are below 1,000
MOST_WORK = 8_000_000  # characters that the evaluation of a script may read and produce
STATEMENT = 200  # characters that a statement counts for


class Budget:
    """The remaining work for one recipe, which ends an expansion that grows exponentially.

    Args:
        subject: the recipe, as the message calls it.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._remaining = MOST_WORK

    def spend(self, characters: int) -> None:
        """Raises UserError where the work would exceed its limit."""
        self._remaining -= characters
        if self._remaining < 0:
            raise UserError(
                f"{self._subject} expands to too much: at most {MOST_WORK:,} characters are evaluated"
            )

    def check_length(self, characters: int) -> None:
        """Raises UserError for a value that is too long."""
        if characters > LONGEST_VALUE:
            raise UserError(
                f"{self._subject} has a value that is too long: at most {LONGEST_VALUE:,} characters"
            )


def read_limited(path: Path, limit: int = LARGEST_FILE, errors: str = "strict") -> str:
    """The text of a file, with Unix line ends.

    Args:
        errors: the treatment of bytes that are no text, as in ``bytes.decode``.

    Raises:
        UserError: if it cannot be read, is no text, or is larger than ``limit`` bytes.
    """
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)  # one byte more shows that the file is too large
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if len(content) > limit:
        raise UserError(f"{path} is too large for a recipe: at most {limit:,} bytes are read")
    try:
        return content.decode("utf-8", errors).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: {error}") from None


def check_size(value: Value, budget: Budget) -> None:
    """Raises UserError for nested lists and mappings that are too large written out."""
    if isinstance(value, str):
        budget.spend(len(value))
        return
    budget.spend(1)
    if isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            check_size(entry, budget)
