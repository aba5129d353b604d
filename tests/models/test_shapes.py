"""Five families of models: packing, micro-batches and ranks change neither the gradient nor the outputs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skyasync.config.schema import Config
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp import backend as fsdp
from skyasync.models.packing import plain_layout
from skyasync.workers.frozen import TeacherWorker
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.tiny_models import save_models
from tests.workers.conftest import config_for, make_batch
from tests.workers.processes import Rank, Ranks
from tests.workers.test_critic import EXPERTS, SMALL

pytestmark = pytest.mark.slow

WIDE: dict[str, Any] = {**SMALL, "initializer_range": 0.1}
SHAPES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**WIDE),
    "qwen2": Qwen2Config(**WIDE),
    "qwen3_tied": Qwen3Config(**WIDE, head_dim=8, tie_word_embeddings=True),
    "gemma2_capped": Gemma2Config(
        **WIDE, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0
    ),
    "qwen3_moe": Qwen3MoeConfig(**WIDE, **EXPERTS, head_dim=8, moe_intermediate_size=16),
}
WIDELY = ("gemma2_capped", "qwen3_moe")  # on four ranks as well


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_models(SHAPES, tmp_path_factory.mktemp("families"))


def ragged() -> UpdateBatch:
    """Groups and rows of very different lengths.

    Advantages have one sign, so that rounding is compared with the whole gradient, not with a small difference.
    """
    batch = UpdateBatch.concatenate(
        [make_batch(), make_batch(groups=1, samples=2, seed=1, longest_response=40)]
    )
    batch.advantages = batch.advantages.abs()
    return batch


def settings(path: str) -> Config:
    cfg = config_for(path)
    cfg.trainer.policy.optimizer_config.max_grad_norm = 0.0
    return cfg


def gradient(worker: PolicyWorker) -> Tensor:
    found = [p.grad for p in worker.backend.model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in found if g is not None]
    return torch.cat([g.flatten() for g in whole])


def of_one(path: str, max_rows: int = 0) -> Tensor:
    cfg = settings(path)
    cfg.trainer.micro_train_batch_size_per_gpu = max_rows
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    worker.forward_backward(ragged())
    return gradient(worker)


def of_a_rank(rank: Rank, hidden_size: int) -> Any:
    batch = ragged()
    rows = split_for_ranks(batch, rank.count, hidden_size)[rank.rank]
    rank.worker.forward_backward(batch.select(rows).trim())
    return gradient(rank.worker).numpy()


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", SHAPES)
def test_one_two_and_four_ranks_packed_or_row_by_row_have_one_gradient(
    shapes: dict[str, str],
    name: str,
    ranks: Callable[[int], Ranks],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = of_one(shapes[name])
    with monkeypatch.context() as changed:
        changed.setattr(fsdp, "can_share_prefixes", lambda config: False)
        assert distance(packed, of_one(shapes[name], max_rows=1)) < 1e-6
    for count in (2, 4) if name in WIDELY else (2,):
        ranks(count).set_up(PolicyWorker, settings(shapes[name]))
        found = ranks(count).call(of_a_rank, SHAPES[name].hidden_size)
        assert all(distance(torch.from_numpy(one), packed) < 1e-6 for one in found)


def reduced(rank: Rank) -> tuple[int, Any]:
    """How often gradients were reduced in an update of several micro-batches, and the result."""
    batch, worker = ragged(), rank.worker
    rows = split_for_ranks(batch, rank.count)[rank.rank]
    with patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as travelled:
        worker.forward_backward(batch.select(rows).trim())
    found = gradient(worker).numpy()
    worker.optimizer_step()
    return travelled.call_count, found


def test_gradients_that_are_added_up_once_and_layers_that_are_recomputed_are_the_same(
    shapes: dict[str, str], ranks: Callable[[int], Ranks]
) -> None:
    cfg = settings(shapes["qwen3_moe"])
    seen = []
    for how, recomputed in (("micro_batch", False), ("update", "selective")):
        cfg.trainer.policy.reduce_gradients, cfg.trainer.policy.gradient_checkpointing = (
            how,
            recomputed,
        )
        ranks(2).set_up(PolicyWorker, cfg)
        seen.append(ranks(2).call(reduced)[0])
    (often, expected), (once, found) = seen
    assert often >= 2 * once and once == SHAPES["qwen3_moe"].num_hidden_layers + 1
    assert distance(torch.from_numpy(found), torch.from_numpy(expected)) < 1e-6


def test_all_but_the_results_of_matrices_and_attention_is_recomputed(
    shapes: dict[str, str],
) -> None:
    """Bytes that autograd keeps of two layers, for each token."""
    layout = plain_layout(*(torch.ones(2, 48, dtype=torch.int64) for _ in range(3)))
    found = {}
    for how in ("selective", True):
        cfg = settings(shapes["llama"])
        cfg.trainer.policy.gradient_checkpointing = how
        worker = PolicyWorker(cfg, threads=1)
        worker.setup()
        before = _tensors()
        kept = worker.backend.model.hidden(layout)
        found[how] = _tensors() - before
        del kept
    config = SHAPES["llama"]
    hidden, heads = config.hidden_size, config.num_attention_heads
    keys = hidden // heads * config.num_key_value_heads
    attention = (
        2 * hidden + 2 * keys + hidden + heads
    )  # queries, keys, values, two results, the softmax's logarithm
    results = attention + 2 * config.intermediate_size + hidden
    assert found["selective"] - found[True] == pytest.approx(2 * 2 * 48 * results * 4, rel=0.05)


def _tensors() -> int:
    """Bytes of all tensors of this process that are not parameters."""
    storages = (thing.untyped_storage() for thing in gc.get_objects() if type(thing) is Tensor)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def taught(rank: Rank) -> Any:
    batch = ragged()
    return rank.worker.logprobs(
        batch.select(split_for_ranks(batch, rank.count)[rank.rank]).trim()
    ).numpy()


def test_a_teacher_on_ranks_of_its_own_says_what_one_rank_says(
    shapes: dict[str, str], ranks: Callable[[int], Ranks]
) -> None:
    cfg, batch = config_for("unused"), ragged()
    cfg.trainer.teacher.model.path = shapes["gemma2_capped"]
    alone = TeacherWorker(cfg, threads=1)
    alone.setup()
    expected = alone.logprobs(batch)
    for count in (2, 4):
        ranks(count).set_up(TeacherWorker, cfg)
        pieces = ranks(count).call(taught)
        for rows, piece in zip(split_for_ranks(batch, count), pieces, strict=True):
            found = torch.from_numpy(piece)
            torch.testing.assert_close(found, expected[rows, : found.shape[1]], atol=2e-6, rtol=0)
