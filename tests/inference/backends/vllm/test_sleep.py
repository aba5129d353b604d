"""vLLM asleep: it frees its memory, and is unchanged when it wakes up. Needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyasync.inference.backends.vllm.engine import VLLMEngine
from skyasync.inference.interface import EngineConfig, GenerationRequest, SamplingParams
from skyasync.weight_sync.transfers.file import remove_weights
from tests.inference.backends.vllm.models import publish, save_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM sleeps on a GPU only"),
]


@pytest.mark.parametrize("tied", [True, False])
async def test_an_engine_that_slept_answers_as_before_once_it_has_weights(
    tmp_path: Path, tied: bool
) -> None:
    model = save_model(tmp_path, tied=tied)
    engine = VLLMEngine(
        EngineConfig(str(tmp_path), dtype="float32", max_model_len=256, max_num_seqs=8, gpu_memory_utilization=0.2,
                     extra={"sleep_mode": True})
    )  # fmt: skip

    async def tokens(name: str) -> list[int]:
        request = GenerationRequest(
            name, [2, 3, 4, 5], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        )
        return [
            token
            async for outputs in engine.generate([request])
            for o in outputs
            for token in o.token_ids
        ]

    await engine.start()
    try:
        before = await tokens("before")
        awake, total = torch.cuda.mem_get_info()
        await engine.sleep()
        asleep, _ = torch.cuda.mem_get_info()
        assert asleep - awake > 0.1 * total, "it should have freed cache and weights"
        update = publish(model, version=1)
        await engine.wake("weights")
        await engine.update_weights(update)
        await engine.wake("cache")
        remove_weights(update.info["path"])
        assert await tokens("after") == before
    finally:
        await engine.shutdown()
