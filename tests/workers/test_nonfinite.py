"""A non-finite gradient can be dropped, on every rank alike, with no effect on later steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.workers.calls import digest
from tests.workers.conftest import config_for, make_batch
from tests.workers.processes import Rank, Ranks


def broken(where: str) -> Any:
    """A batch whose advantages are infinite in the last row, so on the last rank alone, or whose ratio overflows."""
    batch = make_batch(groups=4, seed=3)
    if where == "advantages":
        batch.advantages[-1] = float("inf")
    else:
        batch.loss_weights[-1] = (
            1e38  # a loss that is finite in float64, and a gradient whose norm overflows float32
        )
    return batch


def played(rank: Rank, where: str) -> list[Any]:
    """Drop a broken batch between two good ones; the states before and after it, and the result of the last batch."""
    worker: PolicyWorker = rank.worker

    def part(batch: Any) -> Any:
        return batch.select(split_for_ranks(batch, rank.count)[rank.rank]).trim()

    worker.update_policy(part(make_batch(groups=4, seed=1)))
    before, step = digest(worker), worker.backend.step
    problem = ""
    if where:
        worker.forward_backward(part(broken(where)))
        problem = worker.examine()
        worker.drop_gradient()
    assert all(p.grad is None for p in worker.backend.model.parameters())
    same = digest(worker) == before and worker.backend.step == step
    last = worker.update_policy(part(make_batch(groups=4, seed=2)))
    return [same, problem, last, digest(worker)]


@pytest.mark.parametrize("where", ["advantages", "weights"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_dropped_update_has_no_effect_on_any_rank(
    where: str, count: int, ranks: Callable[[int], Ranks], untied_model: str
) -> None:
    found = {}
    for wrong in ("", where):
        ranks(count).set_up(PolicyWorker, config_for(untied_model))
        found[wrong] = ranks(count).call(played, wrong)
    for (_, _, *clean), (same, problem, *after) in zip(found[""], found[where], strict=True):
        assert same and after == clean
        assert "is not finite" in problem
    assert len({problem.split(":")[0] for _, problem, *_ in found[where]}) == 1, "the ranks agree"


def test_a_gradient_is_scaled_once_however_often_it_is_looked_at(untied_model: str) -> None:
    def stepped(looks: int) -> torch.Tensor:
        worker = PolicyWorker(config_for(untied_model), threads=1)
        worker.setup()
        worker.forward_backward(make_batch())
        assert [worker.examine(0.5) for _ in range(looks)] == [""] * looks
        worker.optimizer_step(scale=0.5)
        return torch.cat([p.detach().flatten() for p in worker.backend.model.parameters()])

    assert torch.equal(stepped(0), stepped(2))
