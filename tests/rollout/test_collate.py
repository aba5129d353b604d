"""Trajectories to tensors: aligned with the tokens, padded on the right."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given

from skyasync.arrays import TURN_TOKENS
from skyasync.errors import UserError
from skyasync.models.batch import RolloutBatch
from skyasync.rollout.collate import collate, collate_in_turns
from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId
from skyasync.trainer.learner import check_experts
from tests.rollout.episodes import action, prompt, trajectory
from tests.rollout.test_parallel_lists import groups
from tests.virtual_time import virtual_time


def batch():
    return collate(
        [
            Group(
                prompt(0),
                [trajectory(action([3, 4], 1.0, version=7)), trajectory(action([5]), repetition=1)],
            ),
            Group(
                prompt(1),
                [
                    trajectory(
                        action([3], 0.5),
                        Segment("observation", [9, 8], reward=0.25),
                        action([4, 6]),
                    )
                ],
            ),
        ]
    )


def test_the_reward_of_a_response_without_tokens_stands_on_the_token_before():
    empty = trajectory(action([], -1.0))
    turns = trajectory(
        action([5], 0.5), Segment("observation", [9, 8]), action([], 1.0), repetition=1
    )
    found = collate([Group(prompt(0), [empty, turns])])
    assert found.rewards.sum(1).tolist() == [-1.0, 1.5] == [t.reward for t in (empty, turns)]


async def turns_during(groups):
    """How often another task ran while the groups were collated."""
    turns = []

    async def other():
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    found = await collate_in_turns(groups)
    task.cancel()
    assert torch.equal(found.tokens, collate(groups).tokens)
    return len(turns)


@virtual_time
async def test_other_tasks_have_their_turn_after_each_group():
    assert (
        await turns_during([Group(prompt(i), [trajectory(action([3, 4], 1.0))]) for i in range(5)])
        == 5
    )


@virtual_time
async def test_other_tasks_have_their_turn_within_a_large_group():
    assert (
        await turns_during(
            [Group(prompt(0), [trajectory(action([3] * TURN_TOKENS)) for _ in range(4)])]
        )
        == 4
    )


def test_every_column_belongs_to_its_token():
    found = batch()
    assert found.tokens.tolist() == [
        [1, 2, 3, 4, 0, 0, 0],
        [1, 2, 5, 0, 0, 0, 0],
        [1, 2, 3, 9, 8, 4, 6],
    ]
    assert found.loss_mask.int().tolist() == [
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 1, 1],
    ]
    assert found.attention_mask.sum(1).tolist() == [4, 3, 7]
    assert found.versions.tolist()[0] == [-1, -1, 7, 7, -1, -1, -1]
    assert found.behaviour_logprobs.tolist()[2] == [0, 0, -0.5, 0, 0, -0.5, -0.5]


def test_a_reward_lands_on_the_last_token_of_the_segment_that_earned_it():
    assert batch().rewards.tolist() == [[0, 0, 0, 1, 0, 0, 0], [0] * 7, [0, 0, 0.5, 0, 0.25, 0, 0]]


def test_groups_are_numbered_in_order():
    assert batch().group_ids.tolist() == [0, 0, 1]


@pytest.mark.matrix
@given(groups())
def test_rows_say_exactly_what_the_trajectories_say(before):
    found = collate(before)
    rows = [
        (trajectory, Trajectory(trajectory.id, sequence))  # each sequence as if it were alone
        for trajectory in (t for group in before for t in group.trajectories)
        for sequence in trajectory.sequences
    ]
    assert len(found) == len(rows)
    ids = range(len(rows)) if found.trajectory_ids is None else found.trajectory_ids.tolist()
    assert [owner is another for owner, _ in rows for another, _ in rows] == [
        i == j for i in ids for j in ids
    ]
    assert not found.loss_mask[:, 0].any()
    assert not (found.loss_mask & ~found.attention_mask).any()
    for row, (_, t) in enumerate(rows):
        assert found.tokens[row][found.attention_mask[row]].tolist() == t.tokens.tolist()
        assert found.versions[row][found.loss_mask[row]].tolist() == t.versions.tolist()
        assert (found.versions[row][~found.loss_mask[row]] == -1).all()
        assert torch.isclose(found.rewards[row].sum(), torch.tensor(t.reward), atol=1e-5)
        logprobs = torch.tensor([p for s in t.actions for p in s.logprobs.tolist()])
        assert torch.equal(found.behaviour_logprobs[row][found.loss_mask[row]], logprobs)


def test_experts_of_all_actions_are_one_row_and_what_is_not_known_is_marked() -> None:
    def experts(*numbers: int) -> np.ndarray:
        return np.array(numbers, np.uint8)[:, None, None]

    def action(tokens: list[int], known: np.ndarray | None) -> Segment:
        return Segment("action", tokens, [0.0] * len(tokens), [0] * len(tokens), experts=known)

    two = [Segment("prompt", [1, 2]), action([3, 4], experts(0, 1, 2)), Segment("observation", [5])]
    two += [action([6], experts(3, 4))]
    trajectories = [
        Trajectory(TrajectoryId(PromptId(0, 0), 0), two),
        Trajectory(TrajectoryId(PromptId(0, 0), 1), [Segment("prompt", [1, 2]), action([3], None)]),
    ]
    batch = collate([Group(Prompt(PromptId(0, 0), [], "env"), trajectories)])
    assert batch.routed_experts is not None
    assert batch.routed_experts[..., 0, 0].tolist() == [[0, 1, 2, 3, 4, 255], [255] * 6]
    longer = RolloutBatch.concatenate([batch, batch]).select(torch.tensor([3])).trim()
    assert longer.routed_experts is not None and longer.routed_experts.shape == (1, 3, 1, 1)
    with pytest.raises(UserError, match="of 1 generated tokens they are not known"):
        check_experts(batch)
    check_experts(batch.select(torch.tensor([0])))
