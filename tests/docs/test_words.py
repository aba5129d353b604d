"""The words of the library: names and prose use the field's terms, a class name stands once, sentences are short."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "skyasync"
LONGEST_SENTENCE = 30  # words, in a docstring

#: a word that is part of an identifier -> what it is called
NAMES = {
    "lent": "shared-memory buffer", "lender": "writer", "borrower": "reader", "lends": "maps",
    "handover": "weight sync", "swap": "weight update", "stamp": "policy version", "stamped": "policy version",
    "age": "staleness", "ahead": "staleness, before", "behind": "staleness, after",
    "race": "oversampling", "spare": "oversampling", "tail": "stragglers", "begun": "partial rollouts",
    "unjudged": "no reward", "verdict": "result", "nonsense": "invalid environment output",
    "dull": "zero-variance group", "elsewhere": "remote", "newcomer": "replacement engine",
    "newcomers": "replacement engines", "latecomer": "late-joining engine", "death": "failure", "deaths": "failures",
    "died": "failed", "dies": "fails", "dead": "failed", "lives": "attempts", "living": "alive, healthy", "life": "lifecycle",
    "pulse": "heartbeat", "revival": "supervisor", "bereaved": "request owner", "survivor": "healthy",
    "marks": "restore point", "book": "prompt ledger", "bookkeeping": "prompt ledger", "cadence": "schedule",
    "due": "schedule", "moments": "optimizer state", "masters": "float32 master weights", "mixture": "moe",
    "axes": "mesh dimensions", "told": "reported", "said": "reported", "asked": "request", "asks": "request",
    "held": "current", "kept": "retained", "wanted": "target", "found": "result",
    "apart": "subprocess worker", "door": "middleware", "strangers": "origin check", "news": "stream poller",
    "forms": "API schemas, signatures", "house": "package layout", "room": "module", "verbs": "subcommands",
    "peers": "other frameworks", "promise": "guarantee", "struck": "fault injected", "siege": "fault injection",
    "whoever": "any", "nobody": "no ...", "anew": "again", "beside": "next to", "judged": "rewarded",
    "places": "positions", "pieces": "in-flight requests", "kinds": "tensor specs", "ends": "stop conditions",
}  # fmt: skip

#: a phrase of docstrings, comments, messages and pages -> what to write
PROSE = {
    r"hand(s|ed|ing)? over": "send, weight sync", r"hand-over": "weight sync", r"lent memory": "shared-memory buffer",
    r"lends?|lender|borrowers?|borrowed": "maps, writer, reader",
    r"sign of life|signs of life|pulse": "heartbeat", r"newcomers?": "replacement engine", r"latecomers?": "late-joining",
    r"bereaved|survivors?|revival": "request owner, healthy, supervisor", r"steps? aside|make way|makes way": "colocation, offload",
    r"begun episodes?|half-played": "partial rollouts", r"unjudged|verdicts?": "no reward, result", r"nonsense": "invalid output",
    r"dull": "zero-variance", r"cadence": "schedule", r"bit for bit|to its bits|to the bit": "bitwise identical",
    r"on virtual time|in virtual time": "in simulation", r"siege|is struck|strikes": "fault injection",
    r"in the mean": "on average", r"in hand": "current", r"anew": "again", r"whoever": "any", r"nobody": "no ...",
    r"refused by name": "raises an error", r"bookkeeping": "ledger", r"elsewhere": "remote, in another place",
    r"beside": "next to, in addition to", r"deaths?|dies|died|dead": "failure, fails, failed",
    r"rows end to end": "packed sequences", r"prompts in common": "shared prefix", r"stamp(s|ed)?": "policy version",
    r"one behind the other": "concatenated", r"says? otherwise": "by default", r"is no longer|are no longer": "not ... any more",
}  # fmt: skip
_PROSE = re.compile(r"\b(" + "|".join(f"(?:{p})" for p in PROSE) + r")\b", re.I)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(LIBRARY.rglob("*.py"))}


def defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that the file itself gives: classes, functions, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text, getattr(node, "lineno", 1)


def prose(path: Path) -> Iterator[tuple[str, int]]:
    """Comments and the strings with a space in them: docstrings, messages, help."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT or (token.type in (tokenize.STRING, 61) and " " in token.string):
                yield token.string, token.start[0]
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.JoinedStr):
            yield "".join(v.value if isinstance(v, ast.Constant) else "X" for v in node.values), node.lineno


def test_a_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: at for name, at in places.items() if len(at) > 1}


def test_names_are_of_the_field() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {name}: not {part!r} but {NAMES[part]}"
        for path, tree in trees().items()
        for name, line in defined_names(tree)
        for part in (p.lower() for p in _PARTS.findall(name))
        if part in NAMES
    ]
    bad += [f"{p.relative_to(ROOT)}: {part}" for p in trees() for part in p.stem.split("_") if part in NAMES]
    assert not bad, f"{len(bad)}\n" + "\n".join(bad)


def test_prose_has_no_words_of_our_own() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {found[0]!r}"
        for path in trees()
        for text, line in prose(path)
        for found in _PROSE.finditer(text)
    ]
    assert not bad, f"{len(bad)}\n" + "\n".join(bad)


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]), ids=str)
def test_pages_have_no_words_of_our_own(page: Path) -> None:
    bad = [f"{n}: {m[0]!r}" for n, line in enumerate(page.read_text().splitlines(), 1) for m in _PROSE.finditer(line)]
    assert not bad, f"{page.name}\n" + "\n".join(bad)


def test_sentences_of_docstrings_are_short() -> None:
    bad = []
    for path, tree in trees().items():
        for text, line in docstrings(tree):
            for block in re.split(r"\n\s*\n|::|\n\s*[-*|]|\n\s{4,}|Raises:|Args:|Returns:", text):
                for sentence in re.split(r"(?<=[.:;!?])\s+", block):
                    if len(sentence.split()) > LONGEST_SENTENCE:
                        bad.append(f"{path.relative_to(ROOT)}:{line}: {len(sentence.split())} words: {sentence[:60]!r}")
    assert not bad, f"{len(bad)}\n" + "\n".join(bad)
