"""Pages of users are short, and the compatibility matrix is the configuration's own."""

from __future__ import annotations

import pytest

from skyasync.config import load_config
from skyasync.errors import UserError
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"
MOST_WORDS = 1000
#: Looked things up in, not read.
REFERENCES = ("benchmarks", "coming_from", "configuration", "glossary", "metrics", "troubleshooting")
SERVER = "generator.engines=[http://127.0.0.1:8000]"
ALWAYS = ("trainer.policy.model.path=owner/model", "data.train_data=rows.jsonl")
COLUMNS = {
    "Plans": ("trainer.plan={}",),
    "Engines": ("generator.backend={}",),
    "Training": ("{}", "generator.backend=transformers", "trainer.placement.policy_num_gpus_per_node=4"),
}


def matrix(title: str) -> list[list[str]]:
    """A table of the compatibility matrix, row by row, without code marks."""
    section = (DOCS / "compatibility.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows if "---" not in row]


def test_pages_of_users_are_short() -> None:
    pages = [*DOCS.glob("*.md"), *(DOCS / "tutorials").glob("*.md"), *(DOCS / "migration").glob("*.md")]
    words = {page.name: len(page.read_text().split()) for page in pages if page.stem not in REFERENCES}
    assert {name: count for name, count in words.items() if count > MOST_WORDS} == {}


@pytest.mark.parametrize("title", COLUMNS)
def test_the_matrix_is_that_of_the_configuration(title: str) -> None:
    (_, *columns), *rows = matrix(title)
    wrong = []
    for setting, *values in rows:
        for column, value in zip(columns, values, strict=True):
            chosen = [own.format(column) for own in COLUMNS[title]] + setting.split()
            try:
                load_config([*ALWAYS, *dict.fromkeys(chosen), *([SERVER] if column.endswith("_server") else [])])
                found = "yes"
            except UserError:
                found = "no"
            if found != value:
                wrong.append(f"{setting}, {column}: the page has {value}, found {found}")
    assert rows and wrong == []
