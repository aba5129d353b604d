"""A message that a page quotes in the first column of a table exists in the code."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import ROOT

QUOTED = [
    (page.name, quote)
    for page in sorted((ROOT / "docs").glob("*.md"))
    for quote in re.findall(r'^\| "([^"|]{12,})" \|', page.read_text(), flags=re.MULTILINE)
]


@cache
def messages() -> list[str]:
    """All text of the package, with a line break for each value of an f-string."""
    nodes = [
        node
        for file in (ROOT / "skyasync").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_bytes()))
    ]
    plain = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    formed = [
        "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    return plain + formed


def test_there_are_quotes() -> None:
    assert QUOTED


@pytest.mark.parametrize(("page", "quote"), QUOTED)
def test_a_quoted_message_is_one_of_the_code(page: str, quote: str) -> None:
    pieces = [piece.strip() for piece in quote.split("...") if piece.strip()]
    assert any(all(piece in message for piece in pieces) for message in messages()), (
        f"{page}: {quote}"
    )
