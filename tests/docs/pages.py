"""The code blocks of the written pages, and the command lines in them.

A block's language is its kind: ``python``, ``bash``, ``yaml``, ``json`` or ``text`` (output, or a grammar). A comment
before a block, invisible on the page, gives details:

    <!-- run -->                  its commands are quick: the test runs them, in a folder with the page's files
    <!-- covered: FILE, ... -->   they are not run here; tests or steps of CI that run similar commands, or the
                                  reason why nothing does

A Python block that begins with ``# name.py`` is that file, for later blocks and commands of the page.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = {"coming_from.md"}  # its keys are the other systems'
_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_NOTE = re.compile(r"<!-- *(run|covered: *([^>]*?)) *-->\s*\Z")
_FILE = re.compile(r"# ([\w/]+\.py)\n")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Block:
    """``note`` is the comment before the block, or ""; ``file`` the name that a Python block gives itself."""

    page: Path
    line: int
    language: str
    text: str
    note: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str:
        found = _FILE.match(self.text) if self.language == "python" else None
        return found[1] if found else ""

    @property
    def quick(self) -> bool:
        return self.note == "run"

    @property
    def covered(self) -> str:
        return self.note.removeprefix("covered:").strip() if not self.quick else ""


def pages() -> list[Path]:
    others = [*sorted((ROOT / "docs").rglob("*.md")), *examples()]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *others]


def examples() -> list[Path]:
    """The READMEs of the folders of examples."""
    return sorted((ROOT / "examples").glob("*/README.md"))


@cache
def blocks() -> list[Block]:
    """Of all pages, in order."""
    return [block for page in pages() for block in _of(page, page.read_text())]


def _of(page: Path, text: str) -> Iterator[Block]:
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        note = _NOTE.search(before)
        indent = found[1]
        body = "".join(line.removeprefix(indent) for line in found[3].splitlines(keepends=True))
        yield Block(page, before.count("\n") + 1, found[2].strip(), body, note[1] if note else "")


def commands(text: str) -> list[list[str]]:
    """The command lines of a shell block as words, without redirections, leading assignments and comments."""
    text = text.replace("\\\n", " ")
    for variable, value in re.findall(r"^for (\w+) in (\S+) .*; do$", text, flags=re.MULTILINE):
        text = text.replace(f"${variable}", value)  # the first pass of the loop
    lines = re.sub(r"^(for .*; do|done)$", "", text, flags=re.MULTILINE).splitlines()
    found = []
    for line in lines:
        for part in re.split(r"\s(?:&&|\|\||;)\s", line):
            part = re.sub(r'"?\$[A-Z]+_[A-Z_]+"?', "1", part)  # a value that a scheduler would set
            words = shlex.split(re.split(r"\s[>|]\s", part)[0], comments=True)
            while words and _ASSIGNMENT.fullmatch(words[0]):
                words = words[1:]
            if words:
                found.append(words)
    return found


def plain(words: list[str]) -> list[str]:
    """Remove ``uv run`` with its options, ``srun`` and ``nice`` before a command."""
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        while words and words[0].startswith("--"):
            words = words[2:] if words[0] in ("--extra", "--with", "--group") else words[1:]
        return ["python", *words] if words[:1] == ["-m"] else words
    return words[1:] if words[0] == "srun" else words
