"""Checkpoints of every combination: the same ranks resume bitwise identically, other ranks read the same state.

Each line of the table is one: what is trained, the ranks that write and resume, those that read, the model's shape.
Every optimizer is there on several kinds of ranks, and every way to divide the work with several optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skyasync.config.schema import Config
from skyasync.models.backend import VALUE_HEAD
from skyasync.workers.critic import CriticWorker
from skyasync.workers.model_worker import ModelWorker
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.test_matrix import Way
from tests.models.test_shapes import ragged
from tests.models.test_shapes import shapes as shapes
from tests.workers import calls
from tests.workers.processes import Rank, Ranks
from tests.workers.test_critic import learning

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

WAYS = {
    "1 rank": Way(),
    "data 2": Way(2),
    "data 4": Way(4),
    "context 2": Way(2, context=2),
    "tensor 2": Way(2, tensor=2),
    "data 2 x context 2": Way(4, context=2),
    "data 2 x tensor 2": Way(4, tensor=2),
    "context 2 x tensor 2": Way(4, context=2, tensor=2),
    "2 replicas of 2": Way(4, replicas=2),
}


def optimized(cfg: Config, dtype: str = "float32", **settings: Any) -> None:
    for section in (cfg.trainer.policy, cfg.trainer.critic):
        section.model.dtype = dtype
        vars(section.optimizer_config).update(settings)


def adapted(cfg: Config) -> None:
    cfg.trainer.policy.lora.rank = 4


def in_few_bits(cfg: Config, kind: str) -> None:
    cfg.trainer.policy.lora.rank, cfg.trainer.policy.lora.base_dtype = 4, kind


def with_a_critic(cfg: Config, rank: int = 0) -> None:
    cfg.trainer.critic.backbone, cfg.trainer.policy.lora.rank = "shared", rank


def recomputed(cfg: Config) -> None:
    cfg.trainer.policy.gradient_checkpointing, cfg.trainer.policy.reduce_gradients = (
        "selective",
        "update",
    )


KINDS: dict[str, Callable[[Config], None]] = {
    "float32": optimized,
    "bfloat16": partial(optimized, dtype="bfloat16"),
    "adapters": adapted,
    "nf4": partial(in_few_bits, kind="nf4"),
    "int8": partial(in_few_bits, kind="int8"),
    "critic on its layers": with_a_critic,
    "critic on its layers, adapters": partial(with_a_critic, rank=4),
    "checkpointing": recomputed,
    "muon": partial(optimized, name="muon"),
    "adamw_8bit": partial(optimized, name="adamw_8bit"),
    "rounded by chance": partial(optimized, dtype="bfloat16", bf16_stochastic_round=True),
    "8 bits, rounded": partial(
        optimized, dtype="bfloat16", name="adamw_8bit", bf16_stochastic_round=True
    ),
    "projected": partial(optimized, max_grad_cosine=0.1),
    "projected, bfloat16": partial(optimized, dtype="bfloat16", max_grad_cosine=0.1),
    "projected, rounded by chance": partial(
        optimized, dtype="bfloat16", bf16_stochastic_round=True, max_grad_cosine=0.1
    ),
}
Case = tuple[str, str, str, str]

POLICIES: list[Case] = [
    ("float32", "data 2", "data 4", "llama"),
    ("float32", "data 2 x tensor 2", "1 rank", "qwen3_moe"),
    ("float32", "2 replicas of 2", "context 2", "gemma2_capped"),
    ("bfloat16", "data 4", "tensor 2", "qwen2"),
    ("bfloat16", "context 2", "data 4", "qwen3_tied"),
    ("bfloat16", "tensor 2", "data 2", "qwen3_moe"),
    ("adapters", "data 2", "1 rank", "gemma2_capped"),
    ("adapters", "data 4", "tensor 2", "qwen3_moe"),
    ("adapters", "context 2 x tensor 2", "data 2", "qwen3_tied"),
    ("adapters", "2 replicas of 2", "context 2", "llama"),
    ("nf4", "2 replicas of 2", "context 2", "llama"),
    ("int8", "data 2 x context 2", "1 rank", "qwen2"),
    ("critic on its layers", "context 2 x tensor 2", "data 2", "qwen3_tied"),
    ("critic on its layers, adapters", "tensor 2", "2 replicas of 2", "llama"),
    ("checkpointing", "data 2", "context 2", "qwen3_moe"),
    ("checkpointing", "tensor 2", "2 replicas of 2", "llama"),
    ("checkpointing", "data 2 x context 2", "tensor 2", "qwen2"),
    ("muon", "data 4", "2 replicas of 2", "qwen3_moe"),
    ("muon", "context 2", "1 rank", "qwen2"),
    ("muon", "tensor 2", "data 4", "gemma2_capped"),
    ("adamw_8bit", "data 2", "data 4", "qwen3_tied"),
    ("adamw_8bit", "2 replicas of 2", "1 rank", "qwen2"),
    ("adamw_8bit", "context 2", "data 2", "qwen3_moe"),
    ("rounded by chance", "1 rank", "data 2", "gemma2_capped"),
    ("rounded by chance", "data 2 x tensor 2", "data 4", "qwen2"),
    ("rounded by chance", "2 replicas of 2", "tensor 2", "qwen3_tied"),
    ("8 bits, rounded", "data 2", "1 rank", "llama"),
    ("projected", "data 2 x tensor 2", "data 2", "qwen3_moe"),
    ("projected, bfloat16", "2 replicas of 2", "1 rank", "gemma2_capped"),
    ("projected, rounded by chance", "data 2", "data 4", "qwen3_tied"),
]
CRITICS: list[Case] = [
    ("float32", "data 2", "data 4", "llama"),
    ("bfloat16", "data 4", "data 2", "qwen3_tied"),
    ("muon", "tensor 2", "1 rank", "gemma2_capped"),
    ("adamw_8bit", "2 replicas of 2", "data 2", "qwen3_moe"),
    ("rounded by chance", "context 2", "data 2", "qwen2"),
    ("projected", "data 2", "1 rank", "llama"),
]


def config(path: str, kind: str, way: str) -> Config:
    cfg = WAYS[way].settings(path, adapters=False)
    cfg.trainer.algorithm.advantage_estimator = "gae"
    cfg.trainer.critic.model.path, cfg.trainer.critic.optimizer_config.lr = path, 1e-2
    cfg.trainer.critic.fsdp_size = cfg.trainer.policy.fsdp_size
    KINDS[kind](cfg)
    return cfg


def update(worker: ModelWorker) -> None:
    batch = (
        learning()
        if VALUE_HEAD in worker.backend.trained or isinstance(worker, CriticWorker)
        else ragged()
    )
    rows = split_for_ranks(batch, worker.backend.spec.mesh_shape.data)[
        worker.backend.spec.mesh_shape.data_rank(worker.rank)
    ]
    worker.forward_backward(batch.select(rows).trim())
    worker.optimizer_step()


def write(rank: Rank, folder: str) -> tuple[str, str]:
    """Digests of the whole state that is saved after a step, and of every rank's after another."""
    torch.manual_seed(
        0
    )  # ranks have drawn different parts of a critic's new head; nothing is drawn after that
    update(rank.worker)
    rank.worker.save(folder)
    saved = calls.digest_of_whole(rank.worker)
    update(rank.worker)
    return saved, calls.digest(rank.worker)


def resume(rank: Rank, folder: str) -> tuple[str, str]:
    rank.worker.load(folder)
    loaded = calls.digest_of_whole(rank.worker)
    update(rank.worker)
    return loaded, calls.digest(rank.worker)


def on(
    way: str, worker: type[ModelWorker], cfg: Config, ranks: Callable[[int], Ranks]
) -> Callable[..., set[Any]]:
    """The answers of new ranks, or of this process if one is enough."""
    count = WAYS[way].ranks
    if count > 1:
        ranks(count).set_up(worker, cfg)
        return lambda function, *args: set(ranks(count).call(function, *args))
    alone = Rank(0, 1, worker(cfg, threads=1))
    if dist.is_initialized():
        dist.destroy_process_group()
    alone.worker.setup()
    return lambda function, *args: {function(alone, *args)}


def check(
    worker: type[ModelWorker], case: Case, path: str, ranks: Callable[[int], Ranks], folder: str
) -> None:
    kind, way, other, _ = case
    written = on(way, worker, config(path, kind, way), ranks)(write, folder)
    assert len(written) == 1, "the ranks differ"
    assert on(way, worker, config(path, kind, way), ranks)(resume, folder) == written
    saved = {state for state, _ in written}
    assert on(other, worker, config(path, kind, other), ranks)(calls.load_whole, folder) == saved


def table(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", cases, ids=lambda case: f"{case[0]}, {case[1]} read by {case[2]}-{case[3]}"
    )


@table(POLICIES)
def test_a_policy_goes_on_bit_for_bit_and_is_read_by_others(
    case: Case, shapes: dict[str, str], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    check(PolicyWorker, case, shapes[case[3]], ranks, str(tmp_path))


@table(CRITICS)
def test_a_critic_goes_on_bit_for_bit_and_is_read_by_others(
    case: Case, shapes: dict[str, str], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    check(CriticWorker, case, shapes[case[3]], ranks, str(tmp_path))
