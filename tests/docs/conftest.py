"""Components that a page registers are removed after its test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import examples  # noqa: F401  (from here, not from a test's folder, which is gone behind it)
from skyasync.cli.train import TINY_CONFIG
from skyasync.registry import REGISTRIES, resolve_reference
from tests.docs.pages import ROOT, blocks


@pytest.fixture
def registries() -> Iterator[None]:
    held = [resolve_reference(reference, kind="registry") for reference in REGISTRIES]
    before = [dict(registry) for registry in held]
    yield
    for registry, parts in zip(held, before, strict=True):
        for name in registry.user_parts().keys() - parts.keys():
            del registry[name]
        registry.update(parts)


@pytest.fixture
def files(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The test's folder, with the files of the page of the parameter ``block``; they can be imported."""
    shown = {
        b.file: b.text
        for b in blocks()
        if b.page == request.getfixturevalue("block").page and b.file
    }
    for folder in (
        "examples",
        "skyasync",
    ):  # commands of the pages are relative to the repository's root
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "ours.yaml").symlink_to(TINY_CONFIG)  # which a command on a page would have written
    for name, text in shown.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in shown:
        sys.modules.pop(name.removesuffix(".py"), None)
