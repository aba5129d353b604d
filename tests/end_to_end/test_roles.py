"""A role that a user's program adds takes part in a run, without changes of the library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skyasync import BasePPOExp, RayPPOTrainer
from skyasync.models.batch import RolloutBatch
from skyasync.workers.roles import ROLES, Role, register_role
from skyasync.workers.worker import Worker
from tests.end_to_end.runs import Train

pytestmark = pytest.mark.slow


class LengthWorker(Worker):
    """Rewards the lengths of responses."""

    def lengths(self, batch: RolloutBatch) -> torch.Tensor:
        return batch.loss_mask.sum(1).float()


class RewardsLength(RayPPOTrainer):
    """Half a point for each token."""

    async def ask_roles(self, batch: RolloutBatch) -> RolloutBatch:
        found = await self.dispatch.ask("lengths", "lengths", batch)
        self.metrics["lengths/mean"] = found.mean().item()
        last = batch.loss_mask.cumsum(1).argmax(1)
        batch.rewards[torch.arange(len(batch)), last] += found / 2
        return batch


class LengthExp(BasePPOExp):
    def get_trainer(self, **parts: Any) -> RayPPOTrainer:
        return RewardsLength.get_trainer(**parts)


@pytest.fixture
def lengths() -> Iterator[None]:
    register_role(Role("lengths", LengthWorker))
    yield
    del ROLES["lengths"]


@pytest.mark.matrix
def test_a_scorer_of_ones_own_rewards_what_is_trained(train: Train, lengths: None) -> None:
    run = train("trainer.max_training_steps=2", experiment=LengthExp)
    assert run.series("lengths/mean") == pytest.approx(
        [n / 32 for n in run.series("policy/tokens")]
    )
    assert run.result is not None
