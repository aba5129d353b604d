"""The model that the endpoint's tests share: random weights, the agents' tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from examples.agents.model import build


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(out=tmp_path_factory.mktemp("model") / "random", steps=0, hidden=64)


@pytest.fixture(scope="session")
def tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model)
