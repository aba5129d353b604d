"""The page about the command has its subcommands; tests/docs tests the commands of all pages."""

from __future__ import annotations

import re
from pathlib import Path

from skyasync.cli.commands import SUBCOMMANDS

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


def test_the_table_has_every_verb() -> None:
    assert re.findall(r"^\| `([a-z]+)` \|", PAGE, flags=re.MULTILINE) == list(SUBCOMMANDS)
