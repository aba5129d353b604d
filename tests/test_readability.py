"""How densely the library is written, held within bounds: a statement does one thing, a name is a noun.

Size is counted in expression nodes (``ast.expr``), which no formatting changes.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import skyasync

LIBRARY = Path(skyasync.__file__).parent
PRONOUNS = frozenset(
    [
        "own",
        "known",
        "each",
        "every",
        "whole",
        "given",
        "what",
        "which",
        "about",
        "before",
        "after",
        "others",
        "other",
        "this",
        "that",
        "these",
        "those",
        "some",
        "most",
        "least",
        "such",
        "there",
        "then",
        "here",
        "mine",
        "theirs",
        "it",
        "its",
        "they",
        "them",
        "one",
        "ones",
        "both",
        "all",
        "none",
        "same",
        "last",
        "first",
        "further",
        "again",
        "so",
        "as",
        "of",
    ]
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LONG = 100  # characters of a line

# Upper bounds, each slightly above what the library has: they may fall, and do not rise.
NODES = 237_000
PER_LINE_OF_CODE = {"nodes": 4.25}
PER_1000_LINES_OF_CODE = {
    "walrus": 1,
    "conditional expression": 12,
    "comprehension": 22,
    "tuple assignment": 1,
}
LONG_LINES = 0.02  # of all lines
PRONOUN_NAMES = 0.004  # of all names that are bound
COMMENTS = 0.04  # of all lines: a lower bound


def documentation_lines(tree: ast.Module) -> set[int]:
    """The lines of docstrings and of other strings that are statements."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def bound_name(node: ast.AST) -> str | None:
    """The name that a node binds: of a variable, an argument or an attribute."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return None


def is_tuple_assignment(node: ast.AST) -> bool:
    """``a, b = x, y``."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def figures(path: Path) -> Counter[str]:
    """What is counted in one file."""
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    documentation = documentation_lines(tree)
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    count = Counter[str](lines=len(lines), comments=len(comments))
    for number, line in enumerate(lines, 1):
        count["long"] += len(line) > LONG
        is_comment = number in comments and line.lstrip().startswith("#")
        count["code"] += bool(line.strip()) and number not in documentation and not is_comment
    for node in ast.walk(tree):
        count["nodes"] += isinstance(node, ast.expr)
        count["walrus"] += isinstance(node, ast.NamedExpr)
        count["conditional expression"] += isinstance(node, ast.IfExp)
        count["comprehension"] += isinstance(node, COMPREHENSIONS)
        count["tuple assignment"] += is_tuple_assignment(node)
        name = bound_name(node)
        if name is not None:
            count["names"] += 1
            count["pronouns"] += name.strip("_") in PRONOUNS
    return count


@pytest.fixture(scope="module")
def library() -> Counter[str]:
    total = Counter[str]()
    for path in LIBRARY.rglob("*.py"):
        total.update(figures(path))
    return total


def test_the_library_grows_no_larger(library: Counter[str]) -> None:
    assert library["nodes"] <= NODES


def test_a_line_does_one_thing(library: Counter[str]) -> None:
    assert library["nodes"] / library["code"] <= PER_LINE_OF_CODE["nodes"]
    too_many = {
        name: round(1000 * library[name] / library["code"], 1)
        for name, bound in PER_1000_LINES_OF_CODE.items()
        if 1000 * library[name] / library["code"] > bound
    }
    assert too_many == {}
    assert library["long"] / library["lines"] <= LONG_LINES


def test_names_are_nouns_and_comments_say_why(library: Counter[str]) -> None:
    assert library["pronouns"] / library["names"] <= PRONOUN_NAMES
    assert library["comments"] / library["lines"] >= COMMENTS


def test_what_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Of a module."""\n\nown, rows = [r for r in ()], 1 if x else 2  # why\n')
    found = figures(file)
    expected = {"lines": 3, "code": 1, "comments": 1, "comprehension": 1, "tuple assignment": 1}
    assert {name: found[name] for name in expected} == expected
    assert found["conditional expression"] == 1 and found["pronouns"] == 1 and found["names"] == 3
