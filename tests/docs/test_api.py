"""The public names are those of docs/api.md."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
LIST = {
    module: re.findall(r"`(\w+)`", names)
    for module, names in re.findall(r"^\| `(skyasync[\w.]*)` \| (.*) \|$", PAGE, flags=re.MULTILINE)
}
PACKAGES = ("skyasync", "skyasync.algorithms", "skyasync.config", "skyasync.envs", "skyasync.observability",
            "skyasync.rewards")  # fmt: skip


@pytest.mark.parametrize("module", PACKAGES)
def test_a_packages_names_are_those_of_the_page(module: str) -> None:
    assert sorted(LIST[module]) == sorted(import_module(module).__all__)


@pytest.mark.parametrize("module", LIST)
def test_every_name_of_the_page_exists_and_says_what_it_is(module: str) -> None:
    for name in LIST[module]:
        found = getattr(import_module(module), name)
        assert found.__doc__, f"{module}.{name}"


def test_every_name_is_shown_from_its_docstring() -> None:
    shown = {
        path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", PAGE, flags=re.MULTILINE)
    }
    registries = set(re.findall(r"`([A-Z_]+)`", PAGE[PAGE.index("## Registries") :]))
    assert {name for names in LIST.values() for name in names} <= shown | registries


def test_members_without_a_docstring_are_shown() -> None:
    assert "show_if_no_docstring: true" in (ROOT / "mkdocs.yml").read_text()
