"""An engine in a Ray actor: its process stays answerable, however many requests wait in it."""

import asyncio

import pytest

from skyasync.engines.protocol import EngineConfig, GenerationRequest, SamplingParams
from skyasync.engines.ray_engine import RayEngine, another
from skyasync.errors import UserError

REQUESTS = 1_100  # each a call of its own; Ray's own limit of an actor's calls at once is 1,000


@pytest.mark.slow
async def test_a_paused_engine_full_of_requests_can_be_resumed(ray_session: None, tied_model: str) -> None:
    async def answer(number: int) -> int:
        request = GenerationRequest(str(number), [1, 2], SamplingParams(max_tokens=1))
        return sum([len(outputs) async for outputs in engine.generate([request])])

    engine = RayEngine("transformers", EngineConfig(tied_model, max_model_len=16, threads=1))
    await engine.start()
    try:
        await engine.pause("keep")
        answers = [asyncio.create_task(answer(number)) for number in range(REQUESTS)]
        async with asyncio.timeout(60):
            while (await engine.stats()).waiting < REQUESTS:
                pass  # asking gives them the turn
            await engine.resume()
            assert await asyncio.gather(*answers) == [1] * REQUESTS
        with pytest.raises(UserError, match="takes 1000 GPUs, and Ray has"):
            another([engine], 1000)
        another([engine], 1000, may_grow=True).kill()  # it waits for a node
    finally:
        await engine.shutdown()
