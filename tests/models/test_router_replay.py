"""The trained model computes with the experts that the engine chose."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.inflight import continuation, join
from skyasync.inference.interface import (
    EngineConfig,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from skyasync.models.batch import RolloutBatch, UpdateBatch
from skyasync.models.router_replay import Routers
from skyasync.rollout.collate import collate
from skyasync.rollout.types import (
    Group,
    Prompt,
    PromptId,
    Segment,
    Trajectory,
    TrajectoryId,
    action_of,
)
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.test_shapes import distance, gradient
from tests.workers.conftest import config_for
from tests.workers.processes import Rank, Ranks
from tests.workers.test_critic import EXPERTS, SMALL

pytestmark = pytest.mark.slow

SHAPE = Qwen3MoeConfig(
    **{**SMALL, "initializer_range": 0.2}, **EXPERTS, head_dim=8, moe_intermediate_size=16
)


GATED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    **SMALL, **GATED, "num_key_value_heads": 4, "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "initializer_range": 0.2,
}  # fmt: skip
OTHERS: list[PreTrainedConfig] = [
    MixtralConfig(
        **{**SMALL, "initializer_range": 0.2}, num_local_experts=4, num_experts_per_tok=2
    ),
    Qwen2MoeConfig(**{**SMALL, "initializer_range": 0.2}, **EXPERTS, moe_intermediate_size=16),
    DeepseekV3Config(**LATENT),
]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float | None, int], str]:
    """A model's folder. ``spread``: probabilities of all experts are equal up to this; None: as initialized."""

    def made(spread: float | None, seed: int) -> str:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SHAPE)
        torch.manual_seed(seed)
        for name, weight in model.state_dict().items():
            if spread is not None and name.endswith("gate.weight"):
                weight.copy_(weight[:1] + spread * torch.randn_like(weight))
        folder = tmp_path_factory.mktemp("moe")
        model.save_pretrained(folder)
        return str(folder)

    return cache(made)


@pytest.fixture(scope="module")
def folders(make: Callable[[float | None, int], str]) -> tuple[str, str]:
    """Of engine and trainer, which differ by rounding."""
    return make(1e-6, 1), make(1e-6, 2)


async def played(path: str, dtype: str = "float32") -> RolloutBatch:
    """Three prompts, four samples each; those of the first have a second turn."""
    engine = TransformersEngine(
        EngineConfig(path, dtype=dtype, max_model_len=64, extra={"routed_experts": True})
    )
    await engine.start()
    groups = []
    try:
        for number in range(3):
            prompt = list(range(3 + number, 12 + 2 * number))
            identity = PromptId(0, number)
            trajectories = []
            turns = [await generated(engine, [prompt] * 4)]
            if number == 0:
                more = [[*prompt, *first.token_ids.tolist(), 7, 8] for first in turns[0]]
                turns.append(await generated(engine, more))
            for sample in range(4):
                segments = [Segment("prompt", prompt)]
                for turn in turns:
                    if turn is not turns[0]:
                        segments.append(Segment("observation", [7, 8]))
                    segments.append(action_of(turn[sample], segments))
                trajectories.append(Trajectory(TrajectoryId(identity, sample), segments))
            groups.append(Group(Prompt(identity, [], "env"), trajectories))
    finally:
        await engine.shutdown()
    return collate(groups)


async def generated(engine: TransformersEngine, prompts: list[list[int]]) -> list[GenerationOutput]:
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    name = len(prompts[0])
    requests = [
        GenerationRequest(f"{name}-{i}", prompt, sampling) for i, prompt in enumerate(prompts)
    ]
    found = {o.request_id: o async for outputs in engine.generate(requests) for o in outputs}
    return [found[request.request_id] for request in requests]


def settings(path: str, **policy: Any) -> Config:
    cfg = config_for(path)
    cfg.trainer.policy.router_replay = "R3"
    cfg.trainer.policy.optimizer_config.max_grad_norm = 0.0
    for name, value in policy.items():
        setattr(cfg.trainer.policy, name, value)
    return cfg


def worker_of(cfg: Config) -> PolicyWorker:
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    return worker


def gap(batch: RolloutBatch, found: Tensor) -> float:
    return float((found - batch.behaviour_logprobs)[batch.loss_mask].abs().max())


def trained(batch: RolloutBatch) -> UpdateBatch:
    mask = batch.loss_mask
    return batch.to_stage(
        UpdateBatch, advantages=mask.float(), loss_weights=mask / mask.sum(), returns=None
    )


@pytest.mark.parametrize(
    ("dtype", "spread", "noise"), [("float32", 1e-6, 2e-5), ("bfloat16", 2e-3, 0.1)]
)
async def test_what_rounding_decides_is_decided_by_the_engine(
    make: Callable[[float | None, int], str], dtype: str, spread: float, noise: float
) -> None:
    batch = await played(make(spread, 1), dtype)
    assert batch.routed_experts is not None and batch.routed_experts.dtype == torch.uint8
    cfg = settings(make(spread, 2))
    cfg.trainer.policy.model.dtype = dtype
    worker = worker_of(cfg)
    assert gap(batch, worker.logprobs(batch)) < noise
    assert gap(batch, worker.logprobs(choosing(batch))) > 3 * noise


async def test_the_routers_of_replayed_experts_learn(
    make: Callable[[float | None, int], str],
) -> None:
    """Replaying the model's own choice changes nothing; another choice has a gradient for the router as well."""
    path = make(None, 0)
    batch = trained(await played(path))
    others = copy(batch)
    others.routed_experts = (batch.routed_experts + 1) % 4
    found = []
    for told in (batch, choosing(batch), others):
        worker = worker_of(settings(path))
        worker.forward_backward(told)
        found.append(gradient(worker))
    gates = [
        p.grad
        for name, p in worker.backend.model.named_parameters()
        if name.endswith("gate.weight")
    ]
    assert distance(found[0], found[1]) < 1e-6 < 0.1 < distance(found[2], found[0])
    assert len(gates) == 2 and all(g is not None and g.norm() > 1e-5 for g in gates)


@pytest.mark.matrix
async def test_packing_and_ranks_replay_alike(
    folders: tuple[str, str], ranks: Callable[[int], Ranks]
) -> None:
    batch = trained(await played(folders[0]))
    batch.routed_experts[2] = batch.routed_experts[2].flip(
        -3
    )  # a sample with another history of the prompt
    whole = worker_of(settings(folders[1], gradient_checkpointing="selective"))
    logprobs = whole.logprobs(batch)
    whole.forward_backward(batch)
    expected = gradient(whole)
    cfg = settings(folders[1])
    cfg.trainer.micro_train_batch_size_per_gpu = 1
    alone = worker_of(cfg)
    alone.forward_backward(batch)
    assert distance(gradient(alone), expected) < 1e-6
    for sizes in ({}, {"context": 2}, {"tensor": 2}):
        cfg = settings(folders[1], gradient_checkpointing=bool(sizes))
        vars(cfg.trainer.parallel).update(sizes)
        ranks(2).set_up(PolicyWorker, cfg)
        for rows, said, found in ranks(2).call(step, batch):
            assert (torch.from_numpy(said) - logprobs[rows, : said.shape[1]]).abs().max() < 2e-6
            assert distance(torch.from_numpy(found), expected) < 1e-6


def step(rank: Rank, batch: UpdateBatch) -> Any:
    worker = rank.worker
    rows = split_for_ranks(batch, worker.backend.spec.mesh_shape.data)[
        worker.backend.spec.mesh_shape.data_rank(rank.rank)
    ]
    mine = batch.select(rows).trim()
    logprobs = worker.logprobs(mine)
    worker.forward_backward(mine)
    return rows.numpy(), logprobs.numpy(), gradient(worker).numpy()


async def test_experts_of_pieces_are_those_of_the_whole(folders: tuple[str, str]) -> None:
    engine = TransformersEngine(
        EngineConfig(folders[0], max_model_len=64, extra={"routed_experts": True})
    )
    await engine.start()
    prompt = [5, 6, 7, 8, 9]
    (whole,) = await generated(engine, [prompt])
    request = GenerationRequest("5-0", prompt, SamplingParams(max_tokens=10, ignore_eos=True))
    answering, parts = asyncio.create_task(generated(engine, [prompt])), []
    while not answering.done():
        parts += [each.experts for each in await engine.progress()]
    experts = np.concatenate(parts)
    assert (
        len(parts) > 1
        and len(parts[0]) >= 5
        and np.array_equal(experts, whole.experts[: len(experts)])
    )
    interrupted = whole.until(4, "abort")
    assert len(interrupted.experts) == 5 + 3
    rest = continuation(request, interrupted)
    (more,) = [o async for outputs in engine.generate([rest]) for o in outputs]
    joined = join(interrupted, pickle.loads(pickle.dumps(more)))
    assert len(joined.token_ids) == 10 and len(joined.experts) == 5 + 9
    assert np.array_equal(joined.experts[8:], more.experts[8:])
    await engine.shutdown()


def test_a_model_without_routers_or_with_others_is_refused_by_name(untied_model: str) -> None:
    with pytest.raises(UserError, match="LlamaForCausalLM has no routers"):
        worker_of(settings(untied_model))
    model = AutoModelForCausalLM.from_config(
        DeepseekV2Config(**LATENT, topk_method="group_limited_greedy")
    )
    with pytest.raises(UserError, match="the routers of deepseek_v2 do not choose"):
        Routers(model)


@pytest.mark.parametrize("shape", OTHERS, ids=lambda shape: shape.model_type)
def test_other_families_routers_choose_what_they_are_told(shape: PreTrainedConfig) -> None:
    """Replaying the recorded choice changes nothing; another choice does."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape).eval()
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        plain = model(tokens).logits
        routers = Routers(model)
        routers.record()
        assert torch.equal(model(tokens).logits, plain)
        chosen = torch.from_numpy(routers.chosen())
        assert chosen.shape == (8, 2, 2)
        routers.replay(chosen[None])
        torch.testing.assert_close(model(tokens).logits, plain, atol=1e-6, rtol=0)
        others = (chosen + 1) % 4
        routers.replay(others)
        moved = model(tokens).logits
        assert (moved - plain).abs().max() > 1e-3 and torch.equal(
            torch.from_numpy(routers.chosen()), others
        )
        routers.replay(torch.full_like(chosen, 255))
        torch.testing.assert_close(model(tokens).logits, plain, atol=1e-6, rtol=0)


def choosing(batch: Any) -> Any:
    """The same model, which chooses the experts itself."""
    return replace(batch, routed_experts=None)


def test_experts_that_vllm_reports_of_layers_without_a_router_are_left_out() -> None:
    config = copy(SHAPE)
    config.num_hidden_layers, config.mlp_only_layers = 4, [0, 2]
    with torch.device("meta"):
        routers = Routers(AutoModelForCausalLM.from_config(config))
    reported = (
        torch.arange(5)[:, None, None] * 10
        + torch.arange(4)[None, :, None]
        + torch.zeros(2, dtype=torch.long)
    )
    routers.replay(reported)
    assert routers._replayed_experts is not None
    assert torch.equal(routers._replayed_experts, reported[:, [1, 3]])
    with pytest.raises(UserError, match="the engine reported 3 layers"):
        routers.replay(reported[:, :3])
