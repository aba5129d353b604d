"""Names and prose use the field's terms, a class name of the library stands once, and its sentences are short."""

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

#: words that are part of an identifier, and what to call it
NAMES_TABLE = """
lent lender borrower lends: shared-memory buffer, writer, reader
handover swap: weight sync, weight update
stamp stamped: policy version
age ahead behind: staleness, before, after
race spare tail: oversampling, stragglers
begun: partial rollouts
judged unjudged verdict: graded, no reward, result
nonsense: invalid environment output
dull: zero-variance group
elsewhere: remote
newcomer newcomers latecomer: replacement engine, late-joining engine
death deaths died dies dead lives living life: failure, alive, attempts, lifecycle
pulse revival bereaved survivor: heartbeat, supervisor, request owner
marks: restore points, delimiters
book bookkeeping: prompt ledger
cadence due: schedule
moments masters: optimizer state, master weights
mixture axes: moe, mesh dimensions
told said asked asks held kept wanted found: a noun, such as message, request, current, retained, target, result
apart strangers news door: subprocess worker, origin check, stream poller, middleware
forms kinds places pieces ends: API schemas, tensor specs, positions, in-flight requests, stop conditions
house room: package layout, capacity
verbs peers promise: subcommands, other frameworks, guarantee
struck siege: fault injected
whoever nobody anew beside: any, no, again, next to
"""
NAMES = {
    word: name
    for words, _, name in (line.partition(": ") for line in NAMES_TABLE.strip().splitlines())
    for word in words.split()
}

#: of docstrings, comments, messages and pages: one regular expression a line
PROSE = r"""
hand(s|ed|ing)? over
hand-over
lent memory
lends?|lender|borrowers?|borrowed
signs? of life|pulse
newcomers?|latecomers?
bereaved|survivors?|revival
steps? aside|makes? way
begun episodes?|half-played
unjudged|verdicts?
nonsense
dull
cadence
bit for bit|to its bits|to the bit
(on|in) virtual time
siege|is struck|strikes
in the mean
in hand
anew
whoever|nobody
refused by name
bookkeeping
elsewhere
beside
deaths?|dies|died|dead
rows end to end
prompts in common
stamp(s|ed)?
one behind the other
says? otherwise
(is|are) no longer
"""
_PROSE = re.compile(rf"\b(?:{'|'.join(PROSE.split(chr(10))[1:-1])})\b", re.IGNORECASE)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")


#: By file of a test: words of the prose check that are data there.
DATA = {
    "tests/examples/test_gsm8k_dataset.py": {"Nobody"},  # an answer of a row
    "tests/interop/test_documented_recipes.py": {"elsewhere"},  # a name of a configuration
    "tests/rewards/test_judge_prompts.py": {"Verdict"},  # answers of a judge
    "tests/run/test_logs.py": {"died"},  # Ray's message
    "tests/user_errors/invalid_inputs.py": {"elsewhere"},  # a name of a folder
    "tests/user_errors/test_process_errors.py": {"verdict"},  # a key of a user's function
}
PROGRAMS = [
    path
    for folder in ("tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(LIBRARY.rglob("*.py"))}


def defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that the file defines: classes, functions, parameters, variables, attributes."""
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
            kind = tokenize.tok_name[token.type]
            if kind == "COMMENT" or (kind in ("STRING", "FSTRING_MIDDLE") and " " in token.string):
                yield token.string, token.start[0]


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
    bad += [
        f"{p.relative_to(ROOT)}: {part}"
        for p in trees()
        for part in p.stem.split("_")
        if part in NAMES
    ]
    assert not bad, f"{len(bad)}\n" + "\n".join(bad)


def test_prose_has_no_words_of_our_own() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {found[0]!r}"
        for path in (*trees(), *PROGRAMS)
        for text, line in prose(path)
        for found in _PROSE.finditer(text)
        if found[0] not in DATA.get(str(path.relative_to(ROOT)), ())
    ]
    assert not bad, f"{len(bad)}\n" + "\n".join(bad)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_words_of_our_own(page: Path) -> None:
    prose = re.sub(
        r"```.*?```|`[^`\n]+`",
        lambda code: "\n" * code[0].count("\n"),
        page.read_text(),
        flags=re.S,
    )
    bad = [
        f"{n}: {m[0]!r}"
        for n, line in enumerate(prose.split("\n"), 1)
        for m in _PROSE.finditer(line)
    ]
    assert not bad, f"{page.name}\n" + "\n".join(bad)


def test_sentences_of_docstrings_are_short() -> None:
    bad = []
    for path, tree in trees().items():
        for text, line in docstrings(tree):
            for block in re.split(r"\n\s*\n|::|\n\s*[-*|]|\n\s{4,}|Raises:|Args:|Returns:", text):
                for sentence in re.split(r"(?<=[.:;!?])\s+", block):
                    if len(sentence.split()) > LONGEST_SENTENCE:
                        bad.append(
                            f"{path.relative_to(ROOT)}:{line}: {len(sentence.split())} words: {sentence[:60]!r}"
                        )
    assert not bad, f"{len(bad)}\n" + "\n".join(bad)
