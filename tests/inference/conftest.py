"""Models for the engines' tests, made once per test session."""

from __future__ import annotations

import pytest

from tests.inference.tiny_llama import save_tiny_llama


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("tied"), tied=True)
