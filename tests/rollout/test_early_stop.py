"""Groups that will be rejected for certain are stopped early; the trained groups are the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.algorithms.shaping import cannot_be_inside, mean_inside
from skyasync.config.schema.algorithm import DynamicSamplingConfig
from skyasync.errors import UserError
from skyasync.rollout.generator_api import generator_output
from skyasync.rollout.group_sampling import GroupMonitor, early_stop_rule
from skyasync.rollout.metrics import rollout_metrics
from skyasync.rollout.types import Prompt, PromptId, Segment, Trajectory, TrajectoryId
from skyasync.utils.task_group import together
from tests.rollout.episodes import action, groups_from_output
from tests.virtual_time import virtual_time

MIDDLE = DynamicSamplingConfig("mean", low=0.25, high=0.75, early_end=True)
rewards = st.lists(st.floats(-1, 2), min_size=1, max_size=6)


@given(rewards, st.data())
def test_a_group_is_decided_only_if_no_further_rewards_bring_it_inside(
    found: list[float], data: st.DataObject
) -> None:
    rest = data.draw(st.lists(st.floats(-1, 2), max_size=6))
    bounds = {"low": 0.25, "high": 0.75, "min_reward": -1.0, "max_reward": 2.0}
    if cannot_be_inside(found, len(found) + len(rest), **bounds):
        assert not mean_inside([*found, *rest], 0.25 + 1e-9, 0.75 - 1e-9)


@pytest.mark.parametrize(("found", "decided"), [([1.0, 1.0], False), ([1.0] * 3, True), ([0.0] * 3, True),
                                                ([0.0, 1.0, 1.0], False), ([0.5] * 4, False)])  # fmt: skip
def test_three_of_four_may_decide(found: list[float], decided: bool) -> None:
    assert (
        cannot_be_inside(found, 4, low=0.25, high=0.75, min_reward=0.0, max_reward=1.0) is decided
    )


def test_nothing_decides_unless_it_is_asked_for() -> None:
    assert early_stop_rule(DynamicSamplingConfig("mean")) is None


class Episodes:
    """Sample r of prompt p ends after r + 1 seconds with ``rewards[p][r]``."""

    def __init__(self, rewards: list[list[float]]) -> None:
        self.rewards, self.cancelled = rewards, []
        self.asked = [
            TrajectoryId(PromptId(0, p), r)
            for p, group in enumerate(rewards)
            for r in range(len(group))
        ]

    async def play(self, identity: TrajectoryId) -> Trajectory:
        try:
            await asyncio.sleep(identity.repetition + 1)
        except asyncio.CancelledError:
            self.cancelled.append(identity)
            raise
        reward = self.rewards[identity.prompt.row][identity.repetition]
        return Trajectory(identity, [Segment("prompt", [5, 6]), action([7], reward)])

    async def all(self, cfg: Any) -> list[Trajectory]:
        decided = early_stop_rule(cfg)
        assert decided is not None
        groups = GroupMonitor(self.asked, decided)
        async with together() as tasks:
            played = [
                tasks.start(groups.play(identity, self.play(identity))) for identity in self.asked
            ]
        return [episode.result() for episode in played]


@virtual_time
async def test_the_other_samples_of_a_decided_group_are_cancelled_and_come_back_without_a_response() -> (
    None
):
    episodes = Episodes([[1.0] * 5, [1.0, 0.0, 1.0, 0.0, 1.0]])
    found = await episodes.all(MIDDLE)
    assert [t.id for t in found] == episodes.asked
    assert [t.ended_early for t in found] == [False] * 4 + [True] + [False] * 5
    assert episodes.cancelled == episodes.asked[4:5]
    prompts = [Prompt(PromptId(0, row), [], "none") for row in range(2)]
    groups = groups_from_output(generator_output(found), prompts, 0, 5)
    assert groups[0].rewards == [1.0] * 4 and not mean_inside(groups[0].rewards, 0.25, 0.75)
    metrics = rollout_metrics(groups)
    assert metrics["dynamic_sampling/ended_early"] == 1 and metrics["reward/mean"] == pytest.approx(
        7 / 9
    )


@virtual_time
async def test_a_cancelled_generation_is_cancelled_and_no_end_of_a_group() -> None:
    episodes = Episodes([[1.0] * 5])
    task = asyncio.create_task(episodes.all(MIDDLE))
    await asyncio.sleep(2.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(episodes.cancelled) == 3


@virtual_time
async def test_a_reward_outside_the_bounds_is_an_error_that_names_them() -> None:
    with pytest.raises(
        UserError, match=r"reward of 3 is outside .*reward_min=0 and .*reward_max=1"
    ):
        await Episodes([[3.0, 1.0]]).all(MIDDLE)
