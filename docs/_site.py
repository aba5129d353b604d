"""What mkdocs is told besides its configuration.

Invariant: a page of the site loads nothing from anywhere else (scripts, styles, fonts, pictures), so reading it tells
nobody; a page that would is an error. Formulas (``math`` blocks, and ``$...$`` in a line) are LaTeX, which GitHub reads
and which becomes pictures here. The theme's scripts would fetch diagrams' and old browsers' helpers from a public
host where a page has diagrams or a browser is ten years old: that host is taken out of them.
"""

import logging
import re
from html import escape
from pathlib import Path
from typing import Any

LOADED = re.compile(
    r"""<(?:script|img|iframe|source|link(?=[^>]*rel=["']?(?:stylesheet|preconnect|icon|preload)))[^>]*?"""
    r"""(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
)
IMPORTED = re.compile(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)")
HELPERS = "https://unpkg.com/"
FORMULA = re.compile(r"^```math\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
IN_LINE = re.compile(r"(?<![`$\w])\$([^$\n`]+)\$(?![`$\w])")
FLIPPED = (1, -1) * 3  # coordinates of a segment: an SVG counts downwards
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
logger = logging.getLogger("mkdocs.plugins.skyasync")


def picture(latex: str) -> str:
    """A formula as an ``<svg>`` in the colour of the text, as high as its text and on its line."""
    from matplotlib import rc_context
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    em = 100.0
    with rc_context({"mathtext.fontset": "cm"}):
        path = TextPath((0, 0), f"${latex}$", prop=FontProperties(size=em))
    box = path.get_extents()
    drawn = "".join(
        "_MLQC"[code] + " ".join(f"{number:.0f}" for number in points * FLIPPED[: len(points)])
        if code < 5
        else "Z"
        for points, code in path.iter_segments(simplify=False, curves=True)
    )
    where = f"{box.x0 - 2:.0f} {-box.y1 - 2:.0f} {box.width + 4:.0f} {box.height + 4:.0f}"
    size = f"width: {(box.width + 4) / em:.3f}em; height: {(box.height + 4) / em:.3f}em"
    style = (
        f"{size}; vertical-align: {(box.y0 - 2) / em:.3f}em; fill: currentColor; max-width: 100%"
    )
    return f'<svg role="img" aria-label="{escape(latex)}" viewBox="{where}" style="{style}"><path d="{drawn}"/></svg>'


def on_page_markdown(markdown: str, **_: object) -> str:
    """Formulas become pictures."""
    markdown = FORMULA.sub(
        lambda found: f'<p style="margin-left: 1.5em; font-size: 1.25em">{picture(found[1])}</p>',
        markdown,
    )
    parts = FENCED.split(markdown)
    parts[::2] = [IN_LINE.sub(lambda found: picture(found[1]), part) for part in parts[::2]]
    return "".join(parts)


def _flat(entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The pages of a section and of the sections in it, with their titles."""
    pages: list[tuple[str, str]] = []
    for title, under in (item for entry in entries for item in entry.items()):
        pages += [(title, under)] if isinstance(under, str) else _flat(under)
    return pages


def llms(name: str, about: str, nav: list[dict[str, Any]], docs: Path) -> str:
    """``llms.txt``: the pages by section, each with its first sentence, for programs that read documentation."""
    lines = [f"# {name}", "", f"> {about}"]
    for part in nav:
        for section, entries in part.items():
            lines += ["", f"## {section}", ""]
            for title, file in _flat(entries):
                text = FENCED.sub("", (docs / file).read_text(encoding="utf-8"))
                prose = [
                    " ".join(block.split())
                    for block in text.split("\n\n")[1:]
                    if re.match(r"[\w`]", block)
                ]
                plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block) for block in prose)
                sentences = (s for block in plain for s in re.split(r"(?<=[.:]) ", block))
                fits = (
                    s for s in sentences if len(s.split()) > 3 and not s.startswith("This page is")
                )
                sentence = next(fits, "").rstrip(":.")
                lines.append(
                    f"- [{title}]({file.removesuffix('.md')}.html)"
                    + (f": {sentence}." if sentence else "")
                )
    return "\n".join(lines) + "\n"


def on_post_build(config: dict[str, Any], **_: object) -> None:
    """A warning, which ``--strict`` counts as an error, for whatever a page or a style would fetch; ``llms.txt``."""
    site = Path(config["site_dir"])
    pages = llms(
        config["site_name"], config["site_description"], config["nav"], Path(config["docs_dir"])
    )
    (site / "llms.txt").write_text(pages, encoding="utf-8")
    for script in sorted(site.rglob("*.js")):
        text = script.read_text(encoding="utf-8")
        if HELPERS in text:
            script.write_text(text.replace(HELPERS, "about:blank#"), encoding="utf-8")
    for page in sorted(site.rglob("*.html")):
        for address in LOADED.findall(page.read_text(encoding="utf-8")):
            logger.warning("%s would load %s", page.relative_to(site), address)
    for style in sorted(site.rglob("*.css")):
        for address in IMPORTED.findall(style.read_text(encoding="utf-8")):
            logger.warning("%s would load %s", style.relative_to(site), address)
