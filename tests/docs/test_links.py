"""Links of pages outside of the site lead somewhere (``mkdocs build --strict`` checks the site's)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, examples

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"```.*?```", re.DOTALL)


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", t)).strip().lower().replace(" ", "-")
            for t in titles}  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    for link in LINK.findall(FENCED.sub("", (ROOT / page).read_text())):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = ROOT / (file or page)
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_every_folder_of_examples_says_what_it_is_and_its_links_lead_somewhere() -> None:
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert {page.parent.name for page in examples()} == folders
    for page in [*examples(), ROOT / "examples" / "README.md"]:
        text = page.read_text()
        if page.parent.name in folders:
            rows = re.findall(r"^\| ([a-z ]+) \| (.+) \|$", text, flags=re.MULTILINE)
            assert [name for name, _ in rows[:5]] == ["goal", "hardware", "time", "expected result", "more"], page
            assert "```bash" in text
            files = re.findall(r"`([\w.]+)`|, ([\w.]+)`", text.rpartition("| file | content |")[2])
            assert all((page.parent / "".join(file)).exists() for file in files if "." in "".join(file)), page
        for link in LINK.findall(FENCED.sub("", text)):
            file, _, anchor = link.partition("#")
            target = page.resolve().parent / file
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in headings(target), f"{page}: {link}"


def test_every_page_is_in_the_sites_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [str(page) for page in docs.rglob("*.md") if f": {page.relative_to(docs)}" not in menu] == []
