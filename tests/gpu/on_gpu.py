"""Runs the workers' and engines' own tests on a GPU, in float32 as on CPUs; those of several ranks stay on the CPU.

python -m pytest -p tests.gpu.on_gpu tests/models tests/workers tests/inference/backends/transformers
python -m pytest -p tests.gpu.on_gpu tests/inference/backends/vllm/test_engine.py tests/weight_sync -k vllm
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from skyasync.inference.backends.transformers.model import EmbeddedModel
from skyasync.inference.backends.vllm.engine import VLLMEngine
from skyasync.inference.interface import EngineConfig
from skyasync.models.backend import ModelSpec, RankContext
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.workers.worker import Worker
from tests import fork_server

SHARE = 0.05
"""Of the GPU's memory, that a vLLM engine takes: tests start several."""


@contextmanager
def no_fork(fork_socket: Path, *, vllm: bool = False) -> Iterator[None]:
    """vLLM's processes start as they do for users: a fork of a process that has asked for GPUs cannot use them."""
    yield


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

    start = VLLMEngine.__init__

    def start_float32(engine: VLLMEngine, config: EngineConfig) -> None:
        dtype = "float32" if config.dtype == "auto" else config.dtype
        options = {"enforce_eager": True, **config.extra.get("engine_kwargs", {})}
        extra = {**config.extra, "engine_kwargs": options}
        start(engine, replace(config, dtype=dtype, gpu_memory_utilization=SHARE, extra=extra))

    FSDPBackend.load, EmbeddedModel.__init__ = load_float32, make_float32  # type: ignore[method-assign]
    VLLMEngine.__init__ = start_float32  # type: ignore[method-assign]
    fork_server.fork_spawned_processes = no_fork
