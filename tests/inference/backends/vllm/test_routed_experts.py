"""Routed experts from vLLM: its own output processor, with the messages that its core sends on a GPU.

vLLM records experts only in its second model runner, which it does not have on CPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from skyasync.config.load import load_config
from skyasync.errors import UserError
from skyasync.inference.backends.vllm.engine import VLLMEngine
from skyasync.inference.backends.vllm.setup import engine_arguments
from skyasync.inference.interface import (
    EngineConfig,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from skyasync.inference.settings import engine_config
from skyasync.models.router_replay import unknown_expert

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

LAYERS, TOP_K, PROMPT = 3, 2, 5


class Core:
    """In place of ``AsyncLLM``."""

    errored = False

    def __init__(self, experts: int) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        self.output_processor = OutputProcessor(None, log_stats=False)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_num_experts=lambda: experts)
        )
        self.dtype = np.uint8 if experts <= 256 else np.uint16  # RoutedExpertsCapturer's
        self.draw = np.random.default_rng(0)
        self.experts, self.sent, self.arrived = experts, list[Any](), asyncio.Event()

    async def is_sleeping(self) -> bool:
        return False

    async def generate(
        self, prompt: Any, parameters: Any, name: str, lora_request: None
    ) -> AsyncIterator[Any]:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        queue = RequestOutputCollector(parameters.output_kind, name)
        request = EngineCoreRequest(
            name,
            prompt["prompt_token_ids"],
            None,
            parameters,
            None,
            0.0,
            None,
            None,
            None,
            external_req_id=name,
        )
        self.output_processor.add_request(request, None, queue=queue)
        self.arrived.set()
        finished = False
        while not finished:
            output = await queue.get()
            finished = output.finished
            yield output

    def step(self, name: str, rows: int, end: Any = None) -> None:
        """One more token, and the experts of the tokens that were computed for it."""
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.outputs import LogprobsLists

        routed = self.draw.integers(self.experts, size=(rows, LAYERS, TOP_K)).astype(self.dtype)
        routed[0, 0, 0] = self.experts - 1
        self.sent.append(routed)
        logprobs = LogprobsLists(np.array([[7]]), np.array([[-0.5]], np.float32), np.array([1]))
        output = EngineCoreOutput(
            name, [7], new_logprobs=logprobs, finish_reason=end, routed_experts=routed
        )
        self.output_processor.process_outputs([output], weight_version="0")


@pytest.mark.parametrize("experts", [8, 255, 256, 512])
async def test_answers_and_progress_have_the_experts_of_all_computed_tokens(experts: int) -> None:
    from vllm.v1.engine import FinishReason

    engine, core = VLLMEngine(EngineConfig("m", extra={"routed_experts": True})), Core(experts)
    engine._llm, engine._end = cast(Any, core), ""
    request = GenerationRequest("a", [1] * PROMPT, SamplingParams(max_tokens=9))
    answers: list[GenerationOutput] = []

    async def ask() -> None:
        async for outputs in engine.generate([request]):
            answers.extend(outputs)

    asking = asyncio.create_task(ask())
    await core.arrived.wait()
    parts = []
    core.step("a", PROMPT)
    parts += await engine.progress()
    core.step("a", 1)
    core.step("a", 1)
    parts += await engine.progress()
    core.step("a", 1, FinishReason.LENGTH)
    await asking
    (answer,) = answers
    assert len(answer.token_ids) == 4
    sent = np.concatenate(core.sent)
    np.testing.assert_array_equal(answer.experts, sent)
    np.testing.assert_array_equal(np.concatenate([part.experts for part in parts]), sent[:-1])
    assert [len(part.token_ids) for part in parts] == [1, 2]
    for output in (answer, *parts):
        assert output.experts is not None
        known = torch.from_numpy(output.experts)
        assert known.dtype == (torch.uint8 if experts <= 255 else torch.int16)
        assert not (known == unknown_expert(known.dtype)).any(), "all experts are known"


def test_a_run_with_router_replay_asks_vllm_for_experts_on_gpus_and_is_rejected_on_cpus(
    tmp_path,
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    cfg = load_config(
        [
            f"trainer.policy.model.path={tmp_path}",
            "trainer.policy.router_replay=R3",
            "generator.backend=vllm",
        ]
    )
    arguments = engine_arguments(engine_config(cfg, gpus=True), cpu=False)
    assert arguments["enable_return_routed_experts"]
    assert AsyncEngineArgs(**arguments).aux_output_config.enabled
    with pytest.raises(
        UserError,
        match=r"router_replay=R3 with generator\.backend=vllm needs GPUs: .*backend=transformers",
    ):
        engine_config(cfg, gpus=False)
