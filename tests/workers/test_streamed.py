"""Streamed training on two ranks: gradients add up over unequal parts, and equal the synchronous plan's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyasync.algorithms.reductions import loss_numerators
from skyasync.rollout.types import Group
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from skyasync.workers.policy import PolicyWorker
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config
from tests.trainer.plans.test_streamed import save_double
from tests.workers.conftest import config_for, make_batch
from tests.workers.processes import Ranks
from tests.workers.ranks_dispatch import DoubleWorker, RanksDispatch

pytestmark = pytest.mark.slow

GROUPS = 6


class GroupByGroup(StreamedRayPPOTrainer):
    """Each group is a part of its own, however many there are at once."""

    async def _train_some(self, groups: list[Group], in_gradient: int) -> int:
        for group in groups:
            in_gradient = await super()._train_some([group], in_gradient)
        return in_gradient


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


async def trained(
    plan: type[RayPPOTrainer], model: str, worker: type[PolicyWorker], ranks: Ranks, samples: int
) -> RanksDispatch:
    cfg = config(model, steps=1, train_batch_size=GROUPS)
    cfg.generator.n_samples_per_prompt = samples
    cfg.trainer.micro_batch_tokens = 64  # so that ranks have different numbers of micro-batches
    if worker is DoubleWorker:
        cfg.trainer.policy.model.dtype = "float64"
    run = LocalRun(plan, cfg, dispatch=RanksDispatch(cfg, ranks, worker))
    await run.train()
    return run.dispatch


@pytest.mark.parametrize(
    ("worker", "close"),
    [pytest.param(PolicyWorker, 1e-6, marks=pytest.mark.matrix), (DoubleWorker, 1e-12)],
    ids=["float32", "float64"],
)
async def test_the_gradient_on_two_ranks_is_that_of_the_synchronous_plan(
    worker: type[PolicyWorker], close: float, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    model = (
        save_double(tmp_path) if worker is DoubleWorker else save_tiny_llama(tmp_path, tied=True)
    )
    sync = await trained(RayPPOTrainer, model, worker, ranks(2), samples=5)
    (expected,) = sync.gradients()
    for plan in (StreamedRayPPOTrainer, GroupByGroup):
        streamed = await trained(plan, model, worker, ranks(2), samples=5)
        (found,) = streamed.gradients()
        assert distance(found, expected) < close
        assert sum(map(sum, streamed.rows)) == sum(map(sum, sync.rows)) == GROUPS * 5
    assert len(streamed.rows) == GROUPS, "the last one: group by group"
    assert any(first != second for first, second in streamed.rows), "five rows on two ranks"


@pytest.mark.parametrize("size", [1, 3], ids="{} rows at a time".format)
async def test_a_rank_without_rows_takes_part_in_every_part(
    size: int, untied_model: str, ranks: Callable[[int], Ranks]
) -> None:
    """Fewer rows than ranks, some with many micro-batches, and one without a loss token."""
    cfg, batch = config_for(untied_model), make_batch(groups=2, samples=4)
    cfg.trainer.micro_batch_tokens = 8
    batch.loss_mask[3] = False
    batch.advantages *= batch.loss_mask
    batch.proximal_logprobs = None

    async def gradient(parts: list[Any]) -> tuple[Tensor, list[list[int]]]:
        dispatch, denominator = RanksDispatch(cfg, ranks(2)), 0.0
        for part in parts:
            part.loss_weights, more = loss_numerators(
                cfg.trainer.algorithm, part.loss_mask, part.group_ids, None
            )
            denominator += more
            await dispatch.forward_backward(part)
        metrics = await dispatch.optimizer_step(0, 1 / denominator)
        assert metrics["tokens"] == int(batch.loss_mask.sum())
        (found,) = dispatch.gradients()
        return found, dispatch.rows

    expected, _ = await gradient([batch])
    found, rows = await gradient(list(batch.split(size)))
    assert distance(found, expected) < 1e-6
    assert size > 1 or all(sorted(each) == [0, 1] for each in rows)
    assert torch.isfinite(found).all()
