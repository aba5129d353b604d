"""Both interfaces between a generator and groups: trajectories, and the parallel lists of user generators."""

import asyncio
import math

import pytest
from hypothesis import given, settings

from skyasync.errors import UserError
from skyasync.rollout.generator_api import (
    TrajectoryGenerator,
    generator_input,
    requests_from_input,
    run_generator,
)
from skyasync.rollout.types import Segment, Trajectory
from tests.rollout.episodes import action, prompt, requests, trajectory
from tests.rollout.test_parallel_lists import groups


class Plays(TrajectoryGenerator):
    """Returns the trajectories of its constructor."""

    def __init__(self, trajectories):
        self.trajectories = trajectories

    async def roll_out(self, input_batch):
        return self.trajectories


class Pays(Plays):
    """A user's subclass that does not use trajectories."""

    async def generate(self, input_batch):
        output = await super().generate(input_batch)
        return {
            **output,
            "rewards": [9.0 for _ in output["rewards"]],
            "rollout_metrics": {"paid": 1.0},
        }


class Wraps:
    def __init__(self, generator):
        self._generator = generator

    async def generate(self, input_batch):
        return await self._generator.generate(input_batch)


def roll_out(generator, rows=1):
    asked = [prompt(row) for row in range(rows)]
    return asyncio.run(run_generator(generator, requests(asked), 0))


def test_trajectories_are_handed_over_as_they_are():
    played = trajectory(action([3, 4], 1.0, version=7))
    ((group,), metrics) = roll_out(Plays([played]))
    assert group.trajectories[0] is played
    assert metrics == {}


def test_a_subclass_that_overrides_generate_is_honoured():
    ((group,), metrics) = roll_out(Pays([trajectory(action([3, 4], 1.0))]))
    assert group.rewards == [9.0]
    assert metrics == {"paid": 1.0}


def test_a_generate_that_is_replaced_on_one_object_is_honoured():
    generator = Plays([trajectory(action([3, 4], 1.0))])
    generator.generate = Pays(generator.trajectories).generate
    assert roll_out(generator)[0][0].rewards == [9.0]


def test_a_wrapper_needs_generate_only():
    assert roll_out(Wraps(Plays([trajectory(action([3, 4], 1.0))])))[0][0].rewards == [1.0]


@settings(max_examples=30, deadline=None)
@given(groups())
def test_both_ways_lead_to_the_same_groups(before):
    async def run():
        prompts = [group.prompt for group in before]
        asked = requests(prompts, len(before[0].trajectories))
        ours = Plays([t for group in before for t in group.trajectories])
        listed, direct = (
            await run_generator(Wraps(ours), asked, 0),
            await run_generator(ours, asked, 0),
        )
        assert listed[0] == direct[0] == before

    asyncio.run(run())


class Answers(TrajectoryGenerator):
    """As the library's generators: a request for each trajectory."""

    async def generate_trajectories(self, requests):
        return [
            Trajectory(each.id, [Segment("prompt", [1]), action([3], 1.0)]) for each in requests
        ]


class Doubles(Answers):
    """A user's subclass that gets lists of prompts."""

    async def roll_out(self, input_batch):
        assert input_batch["env_classes"] == ["none"] * len(input_batch["prompts"])
        found = await super().roll_out(input_batch)
        for each in found:
            each.segments[-1].reward *= 2
        return found


def test_a_subclass_that_overrides_roll_out_is_honoured():
    assert [group.rewards for group in roll_out(Answers(), 2)[0]] == [[1.0], [1.0]]
    assert [group.rewards for group in roll_out(Doubles(), 2)[0]] == [[2.0], [2.0]]


def test_requests_and_the_lists_that_users_are_given_say_the_same():
    asked = requests([prompt(0, answer=1), prompt(1)], samples=2)
    assert requests_from_input(generator_input(asked)) == asked


def test_an_empty_segment_is_left_out():
    empty = Segment("action", [], reward=1.0)
    ((group,), _) = roll_out(Plays([trajectory(empty, stop="abort")]))
    assert [s.kind for s in group.trajectories[0].segments] == ["prompt"]
    assert group.trajectories[0].ended_early


def without_prompt():
    found = trajectory(action([3]))
    found.segments = found.segments[1:]
    return found


@pytest.mark.parametrize(
    ("played", "message"),
    [
        ([], "expected 1, got 0; the first difference is at index 0, expected e0-i0-r0"),
        ([trajectory(action([3]), row=5)], "expected e0-i0-r0, got e0-i5-r0"),
        (
            [trajectory(Segment("action", [3], [-math.inf], [0]))],
            "e0-i0-r0: log-probabilities of generated tokens",
        ),
        ([without_prompt()], "e0-i0-r0: the prompt has no tokens"),
    ],
)
def test_trajectories_that_are_not_whole_or_not_those_asked_for_are_refused(played, message):
    with pytest.raises(UserError, match=message):
        roll_out(Plays(played))
