"""A reward model scores groups while others are generated: a step takes about the longer of the two."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from skyasync.rollout.generator_api import TrajectoryGenerator
from skyasync.rollout.types import GeneratorInput, Segment, Trajectory
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from skyasync.workers.roles import REWARD_ROLE
from tests.trainer.plans.parts import EPOCH, ROW, Run, make_run

PLANS = [RayPPOTrainer, AsyncRayPPOTrainer, FullyAsyncRayPPOTrainer, StreamedRayPPOTrainer]
SAMPLES = 2


class Groups(TrajectoryGenerator):
    """The group of the n-th prompt, in the stream's order, ends after n + 1 seconds."""

    def __init__(self) -> None:
        self.order: dict[Any, int] = {}

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        for identity in input_batch["trajectory_ids"]:
            self.order.setdefault(identity.prompt, len(self.order) % 4)
        return list(
            await asyncio.gather(
                *(self._play(identity) for identity in input_batch["trajectory_ids"])
            )
        )

    async def _play(self, identity: Any) -> Trajectory:
        await asyncio.sleep(1.0 + self.order[identity.prompt])
        tokens = np.array([EPOCH + identity.prompt.epoch, ROW + identity.prompt.row], np.int32)
        said = np.array([7, 8], np.int32)
        action = Segment(
            "action",
            said,
            np.full(2, -0.5, np.float32),
            np.zeros(2, np.int32),
            float(identity.repetition),
        )
        return Trajectory(identity, [Segment("prompt", tokens), action])


class Judge:
    """Rewards are the rows' prompts; a row takes ``seconds``."""

    def __init__(self, seconds: float, per_call: float = 0.0) -> None:
        self.seconds, self.per_call = seconds, per_call
        self.asked: list[int] = []  # rows of each request
        self.busy = False

    async def ask(self, role: str, method: str, batch: Any) -> torch.Tensor:
        assert (role, method) == (REWARD_ROLE, "scores") and not self.busy
        self.busy = True
        await asyncio.sleep(self.per_call + self.seconds * len(batch.tokens))
        self.busy = False
        self.asked.append(len(batch.tokens))
        return batch.tokens[:, 1].float() / ROW


def run_with_judge(plan: type[RayPPOTrainer], judge: Judge, **settings: Any) -> Run:
    run = make_run(
        plan, prompts=4, updating=[0.0], syncing=[0.0], trainer__reward__model__path="a/judge", **settings
    )  # fmt: skip
    run.trainer.generator = Groups()
    run.dispatch.ask = judge.ask  # type: ignore[attr-defined]
    return run


def test_a_step_takes_about_the_longer_of_playing_and_scoring() -> None:
    judge = Judge(seconds=0.5)  # 4 groups of 2 rows: 4 seconds, as long as the last group is played
    run = run_with_judge(RayPPOTrainer, judge).train()
    assert run.tracker.of("time/step_s")[1] == pytest.approx(5.0), (
        "4 s of playing, and the last group's second"
    )
    assert run.tracker.of("time/reward_s")[1] == pytest.approx(4.0)
    assert judge.asked == [2, 2, 2, 2]


def test_groups_gather_while_the_model_is_busy() -> None:
    judge = Judge(seconds=0.0, per_call=2.5)
    run = run_with_judge(RayPPOTrainer, judge).train()
    assert judge.asked == [2, 4, 2], "the first; the two that ended meanwhile; the last"
    assert run.tracker.of("time/step_s")[1] == pytest.approx(1.0 + 3 * 2.5)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_the_rewards_that_whole_batches_gave(plan: type[RayPPOTrainer]) -> None:
    judge = Judge(seconds=0.0, per_call=2.5)
    run = run_with_judge(plan, judge)
    kept: list[Any] = []
    prepare = run.trainer.prepare

    async def noted(groups: Any) -> Any:
        kept.extend(groups)
        return await prepare(groups)

    run.trainer.prepare = noted
    run.train()
    trajectories = [t for group in kept for t in group.trajectories]
    assert len(trajectories) == 4 * SAMPLES
    for t in trajectories:
        score = (ROW + t.id.prompt.row) / ROW
        assert t.metrics["reward_model"] == pytest.approx(score)
        assert t.reward == pytest.approx(t.id.repetition + score)
    assert len(judge.asked) < 4, "groups that end while it is busy are in the next request together"
    assert sum(judge.asked) == 4 * SAMPLES


def test_a_model_on_the_engines_devices_waits_for_its_turn() -> None:
    judge = Judge(seconds=0.5)
    run = run_with_judge(RayPPOTrainer, judge)
    run.trainer.context.reward_model.overlaps = False
    run.train()
    assert judge.asked == [8]
    assert run.tracker.of("time/step_s")[1] == pytest.approx(8.0)


def test_any_failure_fails_the_step() -> None:
    judge = Judge(seconds=0.5)
    run = run_with_judge(RayPPOTrainer, judge)

    async def fails(*args: Any) -> Any:
        raise RuntimeError("the judge is gone")

    run.dispatch.ask = fails  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the judge is gone"):
        run.train()
