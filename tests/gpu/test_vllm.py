"""vLLM on the policy's GPU: its log-probabilities are the policy's after every sync, and it sleeps in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.sync_gaps import Shape, save
from skyasync.inference.interface import ENGINES, EngineConfig, GenerationRequest, SamplingParams
from skyasync.weight_sync.transfers import cuda_ipc
from skyasync.weight_sync.transfers.cuda_ipc import message
from skyasync.weight_sync.update import CUDA_IPC, WeightUpdate
from skyasync.workers.policy import PolicyWorker
from tests.gpu.conftest import HEAD
from tests.gpu.test_embedded_engine import NOISE, by_shared_memory, gap
from tests.gpu.test_policy import worker_on
from tests.workers.conftest import config_for, make_batch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@asynccontextmanager
async def started(path: str, dtype: str, **settings: Any) -> AsyncIterator[Any]:
    engine = ENGINES["vllm"](
        EngineConfig(
            path,
            dtype=dtype,
            max_model_len=64,
            max_num_seqs=16,
            gpu_memory_utilization=0.1,
            **settings,
        )
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


async def in_parts(worker: PolicyWorker, engine: Any, version: int) -> None:
    """As ``CudaIPCTransfer`` does it, to an engine of which only the weights are awake."""
    free, total = torch.cuda.mem_get_info()
    await engine.sleep()
    assert torch.cuda.mem_get_info()[0] - free > 0.05 * total, (
        "an engine asleep has freed its cache and weights"
    )
    await engine.wake("weights")
    worker.transfer_weights("cuda_ipc", "begin", [[0]])
    last, parts = False, 0
    while not last:
        part = message([worker.transfer_weights("cuda_ipc", "pack")])
        await engine.update_weights(WeightUpdate(version, CUDA_IPC, part))
        last, parts = part["last"], parts + 1
    worker.transfer_weights("cuda_ipc", "end")
    await engine.wake("cache")
    assert parts > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", ["tied", "untied"])
@pytest.mark.parametrize("sync", [by_shared_memory, in_parts])
async def test_it_samples_from_the_policy_after_every_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Callable[..., Any], tie: str, dtype: str
) -> None:
    monkeypatch.setattr(cuda_ipc, "PART_BYTES", 10_000)
    path = save(Shape("llama", tie, dtype), str(tmp_path), HEAD)
    worker = worker_on("cuda", config_for(path), dtype)
    settings: dict[str, Any] = {}
    if sync is in_parts:
        settings = {"weight_sync_backend": CUDA_IPC, "extra": {"sleep_mode": True}}
    async with started(path, dtype, **settings) as engine:
        assert await gap(engine, worker, "0/") < NOISE[dtype]
        for version in (1, 2, 3):
            worker.update_policy(make_batch(seed=version))
            await sync(worker, engine, version)
            assert await gap(engine, worker, f"{version}/") < NOISE[dtype]


async def test_its_experts_are_those_of_the_trainers_routers(tmp_path: Path) -> None:
    path = save(Shape("moe", "untied", "float32"), str(tmp_path), HEAD)
    model = AutoModelForCausalLM.from_pretrained(path).cuda()
    prompt = list(range(5, 20))
    async with started(path, "float32", extra={"routed_experts": True}) as engine:
        request = GenerationRequest("a", prompt, SamplingParams(max_tokens=12, ignore_eos=True))
        (answer,) = [output async for outputs in engine.generate([request]) for output in outputs]
    tokens = torch.tensor([[*prompt, *answer.token_ids]], device="cuda")
    with torch.no_grad():
        routers = model(tokens, output_router_logits=True).router_logits
    expected = torch.stack([logits.topk(2).indices.sort(-1).values for logits in routers], 1)[:-1]
    assert np.array_equal(np.sort(answer.experts, -1), expected.cpu().numpy())
