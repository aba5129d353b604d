"""Additions to the site's build: formulas as pictures, and ``llms.txt``."""

from __future__ import annotations

import importlib.util
import re
from xml.etree import ElementTree

import pytest
import yaml

from tests.docs.pages import ROOT

DOCS = ROOT / "docs"
_spec = importlib.util.spec_from_file_location("_site", DOCS / "_site.py")
assert _spec is not None and _spec.loader is not None
SITE = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(SITE)
FORMULAS = SITE.FORMULA.findall((DOCS / "staleness.md").read_text())


def test_every_page_is_in_llms_txt_with_a_sentence() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text()
    nav = yaml.safe_load(configuration[configuration.index("\nnav:") :])["nav"]
    lines = SITE.llms("skyasync", "About.", nav, DOCS).splitlines()
    assert lines[:3] == ["# skyasync", "", "> About."]
    listed = {
        line.partition("](")[2].partition(".html)")[0]: line
        for line in lines
        if line.startswith("- [")
    }
    assert set(listed) == {
        str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")
    }
    assert [
        line for line in listed.values() if line.endswith(".html)") and "hangelog" not in line
    ] == []


@pytest.mark.parametrize("latex", [*FORMULAS, r"\pi_\theta", "P"])
def test_a_formula_becomes_a_picture_in_the_colour_of_the_text(latex: str) -> None:
    svg = ElementTree.fromstring(SITE.picture(latex))
    (path,) = svg
    assert re.fullmatch(r"(M[-\d ]+|[LQC][-\d ]+|Z)+", path.attrib["d"])
    assert svg.attrib["aria-label"] == latex and "currentColor" in svg.attrib["style"]
    assert (
        path.attrib["d"].count("Z")
        >= len(re.findall(r"\\(?:pi|theta|mu|sum)|(?<![\\\w])\w", latex))
        > 0
    )


def test_code_keeps_its_dollars() -> None:
    page = "Costs $x$ and `$y$`.\n\n```bash\necho $HOME $PATH\n```\n\n```math\nx^2\n```\n"
    made = SITE.on_page_markdown(page)
    assert (
        made.count("<svg") == 2
        and "`$y$`" in made
        and "echo $HOME $PATH" in made
        and "```math" not in made
    )
