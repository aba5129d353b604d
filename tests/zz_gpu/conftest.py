"""What a GPU alone shows: one card with torch and transformers; ``test_runs.py`` needs Ray too, nothing needs vLLM.

python -m pytest tests/gpu
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from skyasync.config.schema import Config
from tests.models.test_shapes import SHAPES
from tests.models.tiny_models import save_models
from tests.workers.conftest import config_for

HEAD = 32
"""FlexAttention's kernel takes no heads as small as those of the other tests' models."""


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    if False:
        pytest.skip("no GPU")
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folder of a tiny model of each shape."""
    configs = {}
    for name, config in SHAPES.items():
        configs[name] = copy.deepcopy(config)
        configs[name].head_dim = HEAD
    return save_models(configs, tmp_path_factory.mktemp("shapes"))


@pytest.fixture
def cfg(shapes: dict[str, str]) -> Config:
    return config_for(shapes["llama"])
