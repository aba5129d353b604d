"""The embedded engine on a GPU: the policy's log-probabilities, before and after weights that come by shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyasync.config.schema import Config
from skyasync.inference.interface import ENGINES, EngineConfig, GenerationRequest, SamplingParams
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.policy import PolicyWorker
from tests.gpu.test_policy import worker_on
from tests.workers.conftest import make_batch

SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
NOISE = {"float32": 1e-4, "bfloat16": 0.2}
"""The largest difference of log-probabilities."""


async def gap(engine: Any, worker: PolicyWorker, tag: str) -> float:
    """Between a sampled token's log-probability in the engine and in the policy; of 16 responses."""
    asked = [
        GenerationRequest(f"{tag}{i}", [(5 * i + j) % 90 + 1 for j in range(3 + i % 7)], SAMPLING)
        for i in range(16)
    ]
    largest = 0.0
    async for outputs in engine.generate(asked):
        for output in outputs:
            prompt = next(
                one for one in asked if one.request_id == output.request_id
            ).prompt_token_ids
            (scored,) = worker.score([[*prompt, *output.token_ids]])
            found = torch.tensor(list(output.logprobs)) - torch.tensor(scored[len(prompt) - 1 :])
            largest = max(largest, float(found.abs().max()))
    return largest


async def by_shared_memory(worker: PolicyWorker, engine: Any, version: int) -> None:
    info = worker.transfer_weights("shared_memory", "write")
    worker.transfer_weights("shared_memory", "prove")
    await engine.update_weights(WeightUpdate(version, "shared_memory", info))
    worker.transfer_weights("shared_memory", "release", info["path"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_it_samples_from_the_policy_after_every_sync(cfg: Config, dtype: str) -> None:
    worker = worker_on("cuda", cfg, dtype)
    engine = ENGINES["transformers"](
        EngineConfig(
            cfg.trainer.policy.model.path, dtype=dtype, max_model_len=64, gpu_memory_utilization=0.3
        )
    )
    await engine.start()
    try:
        assert await gap(engine, worker, "0/") < NOISE[dtype]
        for version in (1, 2, 3):
            worker.update_policy(make_batch(seed=version))
            await by_shared_memory(worker, engine, version)
            assert await gap(engine, worker, f"{version}/") < NOISE[dtype]
    finally:
        await engine.shutdown()
