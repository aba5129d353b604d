"""Adapters alone, into a real vLLM engine: it computes with them, replaces them in flight, and faults are found."""

import asyncio

import pytest

from skyasync.inference.backends.vllm import engine as vllm_engine
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.weight_sync.adapters import read_adapter
from skyasync.weight_sync.transfers.file import write_encoded
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate
from tests.inference.tiny_llama import save_tiny_llama
from tests.weight_sync.policy_and_engine import running

pytestmark = [pytest.mark.vllm, pytest.mark.recipe, pytest.mark.timeout(600)]

PROBE = [[*range(1, 60)], [7, 200, 31, 5] * 10]
LORA = {"rank": 4, "alpha": 8.0, "sync": "adapter"}


async def test_the_newest_adapter_is_computed_with_and_another_one_is_found(tmp_path, monkeypatch):
    model = save_tiny_llama(tmp_path, tied=True, head_dim=32)
    async with running(
        "vllm", model, "float32", PROBE, lora=LORA, extra={"adapter_rank": 4}
    ) as pair:
        await pair.hand_over()
        (before,) = await pair.client.score(PROBE)
        request = GenerationRequest(
            "in flight", PROBE[0], SamplingParams(max_tokens=180, ignore_eos=True)
        )
        in_flight = asyncio.create_task(pair.client.generate(request))
        await pair.client.generate(
            GenerationRequest("another", PROBE[1], SamplingParams(max_tokens=2))
        )
        pair.step(2e-2)
        await pair.hand_over()
        metrics = await pair.verify()
        assert metrics["sync/logprob_gap_mean"] <= metrics["sync/logprob_gap_limit"]
        (after,) = await pair.client.score(PROBE)
        assert max(abs(a - b) for a, b in zip(before[0], after[0], strict=True)) > 0.01
        assert set((await in_flight).versions.tolist()) == {1, 2}
        pair.step(2e-2)
        sent = await pair.dispatch.transfer.publish(3)
        other = read_adapter(sent.info["path"])
        name = next(iter(other.weights))
        wrong = other._replace(weights={**other.weights, name: other.weights[name] + 1})
        path = write_encoded(wrong.encode())
        make_folder = vllm_engine.make_adapter_folder
        monkeypatch.setattr(vllm_engine, "make_adapter_folder", lambda _: make_folder(path))
        with pytest.raises(WeightSyncError, match="holds another adapter than was sent in"):
            await pair.client.update_weights(WeightUpdate(3, "shared_memory", sent.info))
