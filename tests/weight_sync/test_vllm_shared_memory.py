"""Weights through shared memory into a real vLLM engine whose output layer is tied to its embedding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from skyasync.inference.backends.vllm.engine import EngineFailedError, VLLMEngine
from skyasync.inference.interface import EngineConfig, GenerationRequest, SamplingParams
from skyasync.weight_sync.transfers.file import remove_weights
from skyasync.weight_sync.update import WeightUpdate
from tests.inference.backends.vllm.models import perturb, publish, save_model, token_logprobs
from tests.inference.output_lists import listed

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 1e-4
PROBES = [[5, 6, 7, 8, 9, 10, 11], list(range(2, 90))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    engines_session: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[LlamaForCausalLM, VLLMEngine]]:
    folder = tmp_path_factory.mktemp("tied")
    model = save_model(folder, tied=True)
    engine = VLLMEngine(
        EngineConfig(str(folder), max_model_len=256, max_num_seqs=64, threads=1, kv_cache_gb=0.25)
    )
    await engine.start()
    yield model, engine
    await engine.shutdown()


async def gap(model: LlamaForCausalLM, engine: VLLMEngine) -> float:
    scores = await engine.score(PROBES)
    return max(
        (torch.tensor(score) - token_logprobs(model, probe)).abs().max().item()
        for probe, score in zip(PROBES, scores, strict=True)
    )


async def sync(model: LlamaForCausalLM, engine: VLLMEngine, version: int) -> None:
    update = publish(model, version)
    await engine.update_weights(update)
    remove_weights(update.info["path"])


@pytest.mark.matrix
async def test_a_tied_model_matches_the_trainer_after_each_of_many_syncs(
    pair: tuple[LlamaForCausalLM, VLLMEngine],
) -> None:
    model, engine = pair
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert await gap(model, engine) <= TOLERANCE
    for version in range(1, 11):
        perturb(model, seed=version)
        assert await gap(model, engine) > 0.1, "the change is large enough to be seen"
        await sync(model, engine, version)
        assert await gap(model, engine) <= TOLERANCE


async def test_sampling_follows_the_sync_too(pair: tuple[LlamaForCausalLM, VLLMEngine]) -> None:
    model, engine = pair
    perturb(model, seed=20)
    await sync(model, engine, 20)
    request = GenerationRequest("after", PROBES[0], SamplingParams(max_tokens=50, ignore_eos=True))
    (output,) = [listed(output) async for batch in engine.generate([request]) for output in batch]
    expected = token_logprobs(model, PROBES[0] + output.token_ids)[len(PROBES[0]) - 1 :]
    assert output.versions == [20] * 50
    assert (torch.tensor(output.logprobs) - expected).abs().max() <= TOLERANCE


async def test_after_a_failed_update_nothing_is_computed_any_more(
    pair: tuple[LlamaForCausalLM, VLLMEngine],
) -> None:
    """The last test of the file: half-loaded weights cannot be restored, so the engine shuts down."""
    _, engine = pair
    request = GenerationRequest(
        "in flight", PROBES[0], SamplingParams(max_tokens=240, ignore_eos=True)
    )
    in_flight = asyncio.create_task(anext(engine.generate([request])))
    await asyncio.sleep(0)
    with pytest.raises(Exception, match="no-such-file"):
        await engine.update_weights(
            WeightUpdate(21, "shared_memory", {"path": "no-such-file.safetensors"})
        )
    for waiting in (in_flight, engine.score(PROBES), engine.resume()):
        with pytest.raises(EngineFailedError, match="the update to version 21 failed"):
            await asyncio.wait_for(waiting, timeout=10)
