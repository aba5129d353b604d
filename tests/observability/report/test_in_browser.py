"""The page in a real browser: no overflow on a phone, every chart is placed, the dark theme is dark."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.screenshots import ask, browser, shoot
from skyasync.observability.report.page import page
from tests.observability.report.folders import make_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        browser() is None, reason="there is no chromium here: apt-get install chromium"
    ),
]

LOOK = """<script>
const wide = [...document.querySelectorAll("main *, header *")].filter(e =>
    !e.closest(".wide, nav, svg") && e.getBoundingClientRect().right > innerWidth + 1);
const small = [...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().width < 200);
const texts = [...document.querySelectorAll(".chart svg text")].map(e => e.getBoundingClientRect().height);
document.title = JSON.stringify({
    inner: innerWidth, page: document.documentElement.scrollWidth, wide: wide.map(e => e.outerHTML.slice(0, 80)),
    small: small.length, svgs: document.querySelectorAll("svg").length, least: Math.min(...texts),
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.querySelector(".chart svg text")).fill,
});
</script>"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run, with a few lines that measure it."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(
        page([make_run(folder / "run")]).replace("</body>", f"{LOOK}</body>")
    )
    return folder / "page.html"


def look(made: Path, **how: Any) -> Any:
    title = re.search(r"<title>(.*?)</title>", ask(made, "--dump-dom", **how), flags=re.DOTALL)
    assert title is not None
    return json.loads(html.unescape(title[1]))


@pytest.mark.matrix
def test_on_a_phone_nothing_sticks_out_and_texts_can_be_read(made: Path) -> None:
    seen = look(made, width=390, height=800)
    assert seen["wide"] == []
    assert seen["page"] <= seen["inner"]
    assert (seen["svgs"], seen["small"]) == (18, 0)
    assert seen["least"] >= 9  # pixels


@pytest.mark.matrix
def test_dark_is_dark_in_pictures_too(made: Path) -> None:
    light, dark = look(made), look(made, dark=True)
    assert light["paper"] == "rgb(245, 246, 248)" and light["ink"] == "rgb(31, 36, 48)"
    assert dark["paper"] == "rgb(20, 23, 28)" and dark["ink"] == "rgb(228, 231, 236)"


def test_a_picture_of_it_can_be_taken(made: Path, tmp_path: Path) -> None:
    shoot(made, tmp_path / "page.png", 390, 600)
    assert (tmp_path / "page.png").stat().st_size > 5_000


def test_what_a_reader_has_opened_stays_open_when_the_live_page_is_updated(tmp_path: Path) -> None:
    opens = """<script>
    const next = document.documentElement.outerHTML;
    fetch = async () => new Response(next);
    document.getElementById("all-settings").open = true;
    const opened = () => [...document.querySelectorAll("details[open]")].map((part) => part.id);
    update().then(() => document.title = JSON.stringify(opened()));
    </script>"""
    (tmp_path / "page.html").write_text(
        page([make_run(tmp_path / "run")], live=True).replace("</body>", f"{opens}</body>")
    )
    assert look(tmp_path / "page.html") == ["all-settings"]
