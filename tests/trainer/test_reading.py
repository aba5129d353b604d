"""The synchronous loop can be followed in few files, and the page that lists them is correct."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_prompts_way_is_at_most_twelve_files_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page[page.index("## A prompt's path through the code") : page.index("## Rules")]
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    assert 0 < len(files) <= 12
    assert [file for file in files if not (ROOT / file).is_file()] == []
