"""The README's badges: what pyproject.toml says, as pictures that stand in the repository.

    python -m benchmarks.badges

Writes docs/pictures/badge-<name>.svg.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "pictures"
# pixels
HEIGHT = 20
MARGIN = 8
CHARACTER = 6.6
GREY = "#555"
BLUE = "#2f6db5"


def badges() -> dict[str, tuple[str, str]]:
    """Name -> label and value."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    low, high = re.findall(r"3\.(\d+)", project["requires-python"])  # the upper one is excluded
    pins = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    versions = dict(
        match.groups() for pin in pins if (match := re.match(r"(\w+)==(\d+\.\d+)", pin))
    )
    return {
        "python": ("Python", f"3.{low} to 3.{int(high) - 1}"),
        "torch": ("PyTorch", versions["torch"]),
        "vllm": ("vLLM", versions["vllm"]),
        "license": ("license", project["license"]),
    }


def picture(label: str, value: str) -> str:
    left, right = (round(len(text) * CHARACTER) + 2 * MARGIN for text in (label, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HEIGHT}" role="img">'
        f"<title>{escape(label)}: {escape(value)}</title>"
        f'<rect width="{left + right}" height="{HEIGHT}" rx="3" fill="{BLUE}"/>'
        f'<path d="M3 0h{left - 3}v{HEIGHT}H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="{GREY}"/>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">{escape(label)}</text><text x="{left + right / 2}" y="14">{escape(value)}</text>'
        "</g></svg>\n"
    )


if __name__ == "__main__":
    for name, (label, value) in badges().items():
        (OUT / f"badge-{name}.svg").write_text(picture(label, value), encoding="utf-8")
