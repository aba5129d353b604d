"""Axes beside the data axis: split matrices and split sequences change neither what a model says nor its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skyasync.config.schema import Config
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.workers.processes import Rank, Ranks
from tests.workers.test_shapes import SHAPES, distance, gradient, ragged, settings
from tests.workers.test_shapes import shapes as shapes

WIDER = [
    ("qwen3_tied", 4, {"tensor": 2}),
    ("gemma2_capped", 4, {"context": 2}),
    ("qwen3_moe", 4, {"context": 2, "tensor": 2}),
]
ONE: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, float]]] = {}


def parallel(path: str, **sizes: int) -> Config:
    cfg = settings(path)
    cfg.trainer.parallel.context, cfg.trainer.parallel.tensor = sizes.get("context", 1), sizes.get("tensor", 1)
    cfg.trainer.algorithm.entropy_loss_coef = 0.01
    return cfg


def of_one(path: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Log-probabilities, gradient and metrics of a step on one rank."""
    if path not in ONE:
        worker = PolicyWorker(parallel(path), threads=1)
        worker.setup()
        logprobs = worker.logprobs(ragged())
        worker.forward_backward(ragged())
        found = gradient(worker)
        ONE[path] = logprobs, found, worker.optimizer_step()
    return ONE[path]


def step(rank: Rank) -> Any:
    worker, batch = rank.worker, ragged()
    axes = worker.axes
    rows = split_for_ranks(batch, axes.data)[axes.rows_of(rank.rank)]
    mine = batch.select(rows).trim()
    logprobs = worker.logprobs(mine)
    worker.forward_backward(mine)
    found = gradient(worker).numpy()
    return rows.numpy(), logprobs.numpy(), found, worker.optimizer_step()


@pytest.mark.parametrize(
    ("name", "count", "sizes"),
    [(name, 2, {axis: 2}) for name in SHAPES for axis in ("tensor", "context")] + WIDER,
    ids=str,
)
def test_split_matrices_and_sequences_have_one_ranks_gradient(
    shapes: dict[str, str], name: str, count: int, sizes: dict[str, int], ranks: Callable[[int], Ranks]
) -> None:
    logprobs, expected, metrics = of_one(shapes[name])
    ranks(count).set_up(PolicyWorker, parallel(shapes[name], **sizes))
    for rows, said, found, told in ranks(count).call(step):
        torch.testing.assert_close(torch.from_numpy(said), logprobs[rows, : said.shape[1]], atol=2e-6, rtol=0)
        apart = distance(torch.from_numpy(found), expected)
        assert apart < 1e-6
        assert told == pytest.approx(metrics, rel=1e-5)
