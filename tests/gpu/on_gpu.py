"""Runs the workers' and engines' own tests on a GPU, in float32 as on CPUs; those of several ranks stay on the CPU.

python -m pytest -p tests.gpu.on_gpu tests/models tests/workers tests/inference/backends/transformers
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from skyasync.inference.backends.transformers.model import EmbeddedModel
from skyasync.inference.interface import EngineConfig
from skyasync.models.backend import ModelSpec, RankContext
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.workers.worker import Worker


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("tests.gpu.on_gpu: this machine has no GPU")
    init: Any = Worker.__init__
    init.__defaults__ = tuple("cuda" if value == "cpu" else value for value in init.__defaults__)
    load, make = FSDPBackend.load, EmbeddedModel.__init__

    def load_float32(backend: FSDPBackend, spec: ModelSpec, ranks: RankContext) -> None:
        load(backend, replace(spec, dtype="float32") if spec.dtype == "auto" else spec, ranks)

    def make_float32(model: EmbeddedModel, config: EngineConfig) -> None:
        make(model, replace(config, dtype="float32") if config.dtype == "auto" else config)

    FSDPBackend.load, EmbeddedModel.__init__ = load_float32, make_float32  # type: ignore[method-assign]
