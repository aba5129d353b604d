"""Every trained token has the experts that the engine chose, in every plan, also in interrupted responses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.learner import check_experts
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.inference.tiny_llama import EOS, VOCABULARY, save_tiny_llama
from tests.trainer.plans.local_run import (
    LocalRun,
    Memory,
    RecordingClient,
    check_tokens,
    config,
    engine_config,
)
from tests.workers.test_critic import EXPERTS, SMALL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_tiny_llama(Path(tmp_path_factory.mktemp("model")), tied=True)  # its tokenizer
    torch.manual_seed(0)
    ends = {
        "vocab_size": VOCABULARY,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "bos_token_id": None,
    }
    shape = {**SMALL, **EXPERTS, **ends, "initializer_range": 0.2, "max_position_embeddings": 512}
    AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(**shape, head_dim=8, moe_intermediate_size=16)
    ).save_pretrained(folder)
    return folder


class FullyAsync(Memory, FullyAsyncRayPPOTrainer):
    pass


class OneStepOff(Memory, AsyncRayPPOTrainer):
    pass


class Sync(Memory, RayPPOTrainer):
    pass


@pytest.mark.parametrize("plan", [Sync, OneStepOff, FullyAsync])
async def test_every_trained_token_has_the_experts_that_it_was_computed_with(
    model: str, plan: type[RayPPOTrainer]
) -> None:
    cut = (
        {"max_staleness": 2, "partial_rollout": "recompute", "train_length": 40}
        if plan is FullyAsync
        else {}
    )
    cfg = config(model, steps=6 if cut else 2, **cut)
    cfg.trainer.policy.router_replay, cfg.generator.backend = "R3", "transformers"
    engine = TransformersEngine(replace(engine_config(model), extra={"routed_experts": True}))
    await engine.start()
    run = LocalRun(plan, cfg, client=RecordingClient, engine=engine)
    first = run.dispatch.weights()
    before = LocalRun(plan, cfg, engine=engine).dispatch
    try:
        await run.train()
    finally:
        await engine.shutdown()
    mixed = check_tokens(run)
    assert mixed or not cut
    for batch in run.dispatch.batches:
        check_experts(batch)
    batch = run.dispatch.batches[0]
    said = before.worker("policy").logprobs(batch)
    assert (said - batch.behaviour_logprobs)[
        batch.loss_mask & (batch.versions == 0)
    ].abs().max() < 1e-5
    assert any(
        not torch.equal(now, first[name])
        for name, now in run.dispatch.weights().items()
        if "gate." in name
    )
