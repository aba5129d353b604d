"""The package's long description: the README, as it reads where its neighbours in the repository are not.

Invariant: nothing of it leads to a file. With the repository's address (``repo_url`` of mkdocs.yml, its only place)
relative links and pictures become absolute ones. Without it links become their text, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = re.compile(r"^repo_url: *[\"']?(https://[^\s\"'#]+)", re.MULTILINE)
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
_MENU = re.compile(r"^\[Installation\](?:.|\n(?!\n))*\n", re.MULTILINE)
_CAPTION = r"\n\n?\*[^*\n]+\*\n"
_PICTURES = rf"\n(?:\|.*\n)*\|.*!\[.*\n(?:\|.*\n)*(?:{_CAPTION})?"  # a table
_ONLY_A_LINK = re.compile(
    rf" ?\({_LINK.pattern}\)|(?<=\.) {_LINK.pattern}\.|^{_LINK.pattern}\. ?", re.MULTILINE
)
WHERE = "The documentation is in the folder `docs` of the source distribution.\n"


def long_description(readme: str, address: str) -> str:
    """The README for a page outside of the repository; ``address`` is "" or that of the repository, without a slash."""
    parts = _FENCED.split(readme)
    parts[::2] = [_absolute(part, address) if address else _plain(part) for part in parts[::2]]
    return "".join(parts)


def _absolute(text: str, address: str) -> str:
    text = _PICTURE.sub(rf"![\1]({address}/raw/main/\2)", text)
    return _LINK.sub(rf"[\1]({address}/blob/main/\2)", text)


def _plain(text: str) -> str:
    text = re.sub(_PICTURES, "", _MENU.sub(WHERE, text))
    text = re.sub(rf":\n\n{_PICTURE.pattern}", ".", text)
    text = re.sub(rf"\n{_PICTURE.pattern}(?:{_CAPTION})?", "", text)
    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(r"\1", _ONLY_A_LINK.sub("", text)))


class LongDescription(MetadataHookInterface):
    """What hatchling calls for the dynamic fields of pyproject.toml."""

    def update(self, metadata: dict[str, object]) -> None:
        root = Path(self.root)
        found = ADDRESS.search((root / "mkdocs.yml").read_text(encoding="utf-8"))
        address = found[1].rstrip("/") if found else ""
        text = long_description((root / "README.md").read_text(encoding="utf-8"), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {"Source": address, "Issues": f"{address}/issues"} if address else {}
