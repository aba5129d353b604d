"""Links of pages outside of the site lead somewhere (``mkdocs build --strict`` checks the site's), and names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, examples

LINK = re.compile(r"\]\(([^)\s]+)\)")
REFERENCE = re.compile(
    r"\b((?:skyasync|examples|benchmarks)(?:\.\w+)+):(\w+)"
)  # module:object, as settings name it
FENCED = re.compile(r"```.*?```", re.DOTALL)


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", t)).strip().lower().replace(" ", "-")
            for t in titles}  # fmt: skip


def defined(module: str) -> set[str]:
    """Functions, classes and imported names at the top of a module, which is not imported: it may register parts."""
    path = ROOT.joinpath(*module.split("."))
    body = ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    ).body
    found = {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found | {
        alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


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
    folders = {
        path.name
        for path in (ROOT / "examples").iterdir()
        if path.is_dir() and not path.name.startswith("_")
    }
    assert {page.parent.name for page in examples()} == folders
    for page in [*examples(), ROOT / "examples" / "README.md"]:
        text = page.read_text()
        if page.parent.name in folders:
            rows = re.findall(r"^\| ([a-z ]+) \| (.+) \|$", text, flags=re.MULTILINE)
            assert [name for name, _ in rows[:5]] == [
                "goal",
                "hardware",
                "time",
                "expected result",
                "more",
            ], page
            assert "```bash" in text
            files = re.findall(r"`([\w.]+)`|, ([\w.]+)`", text.rpartition("| file | content |")[2])
            assert all(
                (page.parent / "".join(file)).exists() for file in files if "." in "".join(file)
            ), page
        for link in LINK.findall(FENCED.sub("", text)):
            file, _, anchor = link.partition("#")
            target = page.resolve().parent / file
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in headings(target), f"{page}: {link}"


def test_every_page_is_in_the_sites_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [
        str(page) for page in docs.rglob("*.md") if f": {page.relative_to(docs)}" not in menu
    ] == []


def test_objects_that_pages_and_recipes_name_exist() -> None:
    files = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *examples(),
        *(ROOT / "examples").rglob("*.yaml"),
    ]
    named = {reference for file in files for reference in REFERENCE.findall(file.read_text())}
    assert len(named) > 20
    assert [name for name in sorted(named) if name[1] not in defined(name[0])] == []
