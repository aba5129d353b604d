"""The schedule's text is parsed as it was written: when versions change, and when requests are interrupted."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from skyasync.inference.inflight import join
from skyasync.inference.interface import GenerationOutput
from skyasync.rollout.reenactment import requests_of
from skyasync.rollout.schedule import Change, ScheduledGroup, ScheduledStep, changes_of, digest, parse_turn, turn_text
from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId

PIECES = st.lists(st.lists(st.integers(0, 12), max_size=6).map(sorted), min_size=1, max_size=4)


def answer(pieces: list[list[int]]) -> GenerationOutput:
    """Parts with these versions, each after the first in a new request."""
    first, *others = [GenerationOutput("r", list(range(len(p))), [0.0] * len(p), p) for p in pieces]
    for other in others:
        first = join(first, other)
    return first


@given(PIECES)
def test_every_token_has_its_version_and_every_cut_its_place(pieces: list[list[int]]) -> None:
    output = answer(pieces)
    turn = changes_of(output)
    assert parse_turn(turn_text(turn)) == turn
    versions = [[c.version for c in turn if c.token <= token][-1] for token in range(len(output.versions))]
    assert versions == output.versions.tolist()
    assert {c.token for c in turn if c.cut} == {cut for cut in output.cuts if cut < len(output.versions)}
    if turn:
        starts = [start for start, _, _ in requests_of(turn)]
        assert starts == sorted({0, *(c.token for c in turn if c.cut)})
        assert [change for _, own, _ in requests_of(turn) for change in own] == [(c.token, c.version) for c in turn]


def test_an_answers_cuts_reach_other_processes_and_end_with_it() -> None:
    import pickle

    output = answer([[1, 1], [2], []])
    assert output.cuts == (2, 3)
    assert pickle.loads(pickle.dumps(output)).cuts == (2, 3)
    assert output.until(3, "stop").cuts == (2,)


def group(versions: list[list[int]], *, given_up: bool = False) -> Group:
    identity = PromptId(2, 17)
    trajectories = []
    for repetition, own in enumerate(versions):
        action = Segment("action", [1] * len(own), [-0.5] * len(own), own, 1.0)
        trajectories.append(Trajectory(TrajectoryId(identity, repetition), [Segment("prompt", [3]), action]))
    trajectories[0].metrics = {"given_up": 1.0} if given_up else {}
    return Group(Prompt(identity, [], ""), trajectories)


def test_a_step_is_read_as_it_was_written() -> None:
    groups = tuple(
        ScheduledGroup.of(each, 3, n)
        for n, each in enumerate([group([[3, 3], [3]]), group([[3, 4], [5]]), group([[3]], given_up=True)])
    )
    assert [each.oldest for each in groups] == [3, 3, -1]
    step = ScheduledStep(6, (24, 26), groups, (("e2-i17",), ("e0-i1", "e0-i2")), frozenset({"e2-i17"}))
    row = json.loads(json.dumps({"step": 6, **step.row()}))
    read = ScheduledStep.parse(row)
    plain = ScheduledGroup.parse(row["groups"][0])
    assert (read.positions, read.parts, read.whole) == ((24, 26), step.parts, step.whole)
    assert read.groups[1:] == groups[1:]
    assert len(row["groups"][0]) == 4 and plain.turn(0, 0) == (Change(0, 3),), "one version: nothing more is written"


def test_a_turn_that_was_not_recorded_has_the_version_of_the_one_before() -> None:
    one = ScheduledGroup.of(group([[3, 4]]), 3, 0)
    assert one.turn(0, 1) == (Change(0, 4),) and one.turn(5, 0) == (Change(0, 3),)


def test_digests_tell_rewards_and_versions() -> None:
    digests = {digest(group(versions).trajectories) for versions in ([[1, 1]], [[1, 2]], [[1], [1]])}
    other = group([[1, 1]])
    other.trajectories[0].actions[0].reward = 0.5
    assert len(digests | {digest(other.trajectories)}) == 4
