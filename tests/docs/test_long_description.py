"""The package's long description, which PyPI shows: the README without links to files that are not there."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from tests.docs.pages import ROOT
from tests.docs.test_links import FENCED, LINK

README = (ROOT / "README.md").read_text()
ADDRESS = "https://forge.example/owner/skyasync"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``.ci/long_description.py`` as a build loads it; hatchling itself is installed only in builds."""
    interface = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location(
        "long_description", ROOT / ".ci/long_description.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_build_takes_it_from_the_readme(hook: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (
        set(project["project"]["dynamic"]) == {"readme", "urls"}
        and "custom" in project["tool"]["hatch"]["metadata"]["hooks"]
    )
    building = hook.LongDescription()
    building.root = str(ROOT)
    metadata: dict[str, object] = {}
    building.update(metadata)
    address = hook.ADDRESS.search((ROOT / "mkdocs.yml").read_text())
    text = hook.long_description(README, address[1] if address else "")
    assert metadata["readme"] == {"content-type": "text/markdown", "text": text}
    assert bool(metadata["urls"]) == bool(address)


def test_without_an_address_it_has_no_links_and_reads_well(hook: ModuleType) -> None:
    text = hook.long_description(README, "")
    prose = FENCED.sub("(code)", text)
    assert LINK.findall(prose) == [] and "![" not in prose
    assert hook.WHERE in text and "Installation ·" not in text
    assert re.findall(r"[^`\w]\(\)|\n{4}|:\n\n\n|^ \S", prose, flags=re.MULTILINE) == []
    assert FENCED.findall(text) == FENCED.findall(README)


def test_with_an_address_every_link_is_absolute_and_its_file_exists(hook: ModuleType) -> None:
    links = LINK.findall(FENCED.sub("", hook.long_description(README, ADDRESS)))
    assert len(links) == len(LINK.findall(FENCED.sub("", README)))
    for link in links:
        kind, file = re.match(rf"{ADDRESS}/(blob|raw)/main/([^#]*)", link).groups()  # type: ignore[union-attr]
        assert (ROOT / file).exists(), link
        assert (kind == "raw") == file.endswith((".svg", ".png")), link


def test_the_address_stands_in_one_place() -> None:
    address = yaml.safe_load(
        re.search(r"^repo_url: .*$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)[0]
    )["repo_url"]  # type: ignore[index]
    if address:
        files = [
            ROOT / name
            for name in (
                "README.md",
                "pyproject.toml",
                "CONTRIBUTING.md",
                ".ci/long_description.py",
            )
        ]
        assert [file.name for file in files if address in file.read_text()] == []
