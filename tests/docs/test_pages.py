"""Pages of users are short, and the compatibility matrix agrees with the configuration."""

from __future__ import annotations

import ast
import re

import pytest

from skyasync.config import load_config
from skyasync.errors import UserError
from tests.docs.pages import ROOT, blocks

DOCS = ROOT / "docs"
MOST_WORDS = 1000
LONGEST_MEAN = 20  # words in a sentence
#: Reference pages.
REFERENCES = (
    "benchmarks",
    "coming_from",
    "configuration",
    "glossary",
    "metrics",
    "troubleshooting",
)
SERVER = "generator.engines=[http://127.0.0.1:8000]"
ALWAYS = ("trainer.policy.model.path=owner/model", "data.train_data=rows.jsonl")
COLUMNS = {
    "Plans": ("trainer.plan={}",),
    "Engines": ("generator.backend={}",),
    "Training": (
        "{}",
        "generator.backend=transformers",
        "trainer.placement.policy_num_gpus_per_node=4",
    ),
}

#: Settings that a plan requires.
NEEDED = {
    "colocated_async": ["trainer.placement.colocate_all=true"],
    "hybrid_async": ["generator.hybrid_engines=1"],
}


def matrix(title: str) -> list[list[str]]:
    """A table of the compatibility matrix, row by row, without code marks."""
    section = (
        (DOCS / "compatibility.md")
        .read_text()
        .partition(f"\n## {title}\n")[2]
        .partition("\n## ")[0]
    )
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows if "---" not in row]


def test_pages_of_users_are_short() -> None:
    pages = [
        *DOCS.glob("*.md"),
        *(DOCS / "tutorials").glob("*.md"),
        *(DOCS / "migration").glob("*.md"),
    ]
    words = {
        page.name: len(page.read_text().split()) for page in pages if page.stem not in REFERENCES
    }
    assert {name: count for name, count in words.items() if count > MOST_WORDS} == {}


def test_sentences_of_pages_are_short_on_average() -> None:
    """Of the prose: without code, tables and headings."""
    long = {}
    for page in [ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "tutorials").glob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        text = re.sub(r"^(\||#|<|!).*$", "", text, flags=re.MULTILINE)
        sentences = [
            part.split()
            for part in re.split(r"(?<=[.:!?])\s+|\n\n|\n- ", text)
            if len(part.split()) > 2
        ]
        if sentences and (mean := sum(map(len, sentences)) / len(sentences)) > LONGEST_MEAN:
            long[page.name] = round(mean, 1)
    assert long == {}


@pytest.mark.parametrize(
    "page",
    ["staleness", "callbacks", "weight_sync", "troubleshooting", "compatibility", "which_plan"],
)
def test_what_people_search_for_is_one_link_from_the_first_page(page: str) -> None:
    assert f"({page}.md)" in (DOCS / "index.md").read_text()


@pytest.mark.parametrize(
    ("page", "answer"),
    [
        ("staleness.md#importance-weight", r"w_t = \frac{\pi_\mathrm{prox}"),
        ("callbacks.md", "def on_step_end(self, trainer, metrics)"),
        ("weight_sync.md", "| `nccl` | by NCCL broadcast"),
        ("troubleshooting.md#out-of-memory", "trainer.micro_batch_tokens"),
    ],
)
def test_a_question_is_answered_one_link_from_the_readme(page: str, answer: str) -> None:
    file, _, anchor = page.partition("#")
    readme, text = (ROOT / "README.md").read_text(), (DOCS / file).read_text()
    assert f"(docs/{page})" in readme
    section = text[text.lower().index(f"\n## {anchor.replace('-', ' ')}") :] if anchor else text
    assert answer in (section[1:].partition("\n## ")[0] if anchor else section)


def test_the_statements_to_a_first_training_are_counted() -> None:
    """Those of the smallest program, and of the same one for TRL."""
    page = DOCS / "python_api.md"
    programs = [
        block.text for block in blocks() if block.page == page and "\nrows = " in block.text
    ]
    ours, theirs = (
        sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text))) for text in programs
    )
    text = " ".join(page.read_text().split())
    assert (
        f"the program above has {ours - 1} statements" in text
        and f"`GRPOTrainer`, in {theirs} statements" in text
    )


def test_the_command_has_one_spelling() -> None:
    assert [
        block.name
        for block in blocks()
        if block.language == "bash" and re.search(r"-m skyasync\b(?!\.)", block.text)
    ] == []


def test_the_support_matrix_is_that_of_the_readme() -> None:
    readme = (
        (ROOT / "README.md")
        .read_text()
        .partition("## What has been tested")[2]
        .partition("\n## ")[0]
    )
    rows = [line for line in readme.splitlines() if line.startswith("|")]
    assert len(rows) > 5 and "\n".join(rows) in (DOCS / "compatibility.md").read_text()


@pytest.mark.parametrize("title", COLUMNS)
def test_the_matrix_is_that_of_the_configuration(title: str) -> None:
    (_, *columns), *rows = matrix(title)
    wrong = []
    for setting, *values in rows:
        for column, value in zip(columns, values, strict=True):
            chosen = (
                [own.format(column) for own in COLUMNS[title]]
                + NEEDED.get(column, [])
                + setting.split()
            )
            try:
                load_config(
                    [
                        *ALWAYS,
                        *dict.fromkeys(chosen),
                        *([SERVER] if column.endswith("_server") else []),
                    ]
                )
                found = "yes"
            except UserError:
                found = "no"
            if found != value:
                wrong.append(f"{setting}, {column}: the page has {value}, found {found}")
    assert rows and wrong == []
