"""Between trajectories and the parallel lists of user generators."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.errors import UserError
from skyasync.rollout.generator_api import generator_output
from skyasync.rollout.types import Group, PromptId, Segment, Trajectory, TrajectoryId
from tests.rollout.episodes import action, groups_from_output, prompt, trajectory

TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=4)
NUMBERS = st.floats(-5, 5, allow_nan=False).map(lambda x: round(x, 3))


@st.composite
def segments(draw):
    """A prompt, then actions and observations in turns, as episodes have them."""
    found = [Segment("prompt", draw(TOKENS))]
    for turn in range(draw(st.integers(1, 4))):
        if turn:
            found.append(Segment("observation", draw(TOKENS)))
        tokens = draw(TOKENS)
        logprobs = [draw(NUMBERS) for _ in tokens]
        versions = [draw(st.integers(0, 3)) for _ in tokens]
        found.append(Segment("action", tokens, logprobs, versions, draw(NUMBERS)))
    return found


@st.composite
def groups(draw):
    samples = draw(st.integers(1, 3))
    found = []
    for row in range(draw(st.integers(1, 3))):
        of_one = [
            Trajectory(
                TrajectoryId(PromptId(0, row), repetition), draw(segments()),
                draw(st.sampled_from(["stop", "length"])), {"turns": draw(NUMBERS)},
                draw(st.lists(segments(), max_size=2)),
            )
            for repetition in range(samples)
        ]  # fmt: skip
        found.append(Group(prompt(row), of_one))
    return found


@given(groups())
def test_the_contracts_form_and_back_is_the_same_trajectories(before):
    output = generator_output([t for group in before for t in group.trajectories])
    after = groups_from_output(output, [g.prompt for g in before], 99, len(before[0].trajectories))
    assert after == before


def output(**changed):
    """Two prompts with one trajectory each: ``1 2 | 3 4``, and ``1 2 | 3 (9) 4``."""
    found = generator_output(
        [
            trajectory(action([3, 4], 1.0, version=7), row=0),
            trajectory(action([3], 0.0), Segment("observation", [9]), action([4], 0.5), row=1),
        ]
    )
    return {**found, **changed}


def convert(found, samples=1):
    return groups_from_output(found, [prompt(0), prompt(1)], 5, samples)


def test_one_reward_for_a_trajectory_is_earned_by_its_last_action():
    first, second = convert(output(rewards=[0.25, 2]))
    assert [s.reward for s in first.trajectories[0].segments] == [0.0, 0.25]
    assert [s.reward for s in second.trajectories[0].segments] == [0.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize("mask", [[1, 1], [1, 0], [0, 0]])
@pytest.mark.parametrize("reward", [1.0, [0.0, 1.0]])
def test_no_reward_is_lost_where_the_mask_leaves_tokens_out(mask, reward):
    first, _ = convert(output(loss_masks=[mask, [1, 0, 1]], rewards=[reward, 0.0]))
    assert first.rewards == [1.0]


def test_a_response_without_tokens_has_its_reward():
    empty = {name: [[], output()[name][1]] for name in ("response_ids", "loss_masks")}
    for name in ("rollout_logprobs", "rollout_versions"):
        empty[name] = [[], output()[name][1]]
    first, second = convert(output(rewards=[-1.0, 2.0], **empty))
    assert (first.rewards, second.rewards) == ([-1.0], [2.0])


def test_rewards_may_be_numpys():
    first, _ = convert(
        output(rewards=[np.float32(0.5), [np.float32(0), np.int64(0), np.float64(1)]])
    )
    assert first.rewards == [0.5]


def test_without_stamps_every_token_has_the_given_version():
    found = output()
    del found["rollout_versions"]
    assert [g.trajectories[0].versions.tolist() for g in convert(found)] == [[5, 5], [5, 5]]


def test_without_logprobs_they_are_nan_and_not_zero():
    first, _ = convert(output(rollout_logprobs=None))
    assert all(math.isnan(p) for p in first.trajectories[0].actions[0].logprobs)


def test_an_empty_response_has_no_action():
    first, _ = convert(
        output(response_ids=[[], [3, 9, 4]], loss_masks=[[], [1, 0, 1]], rewards=[[], [0, 0, 0]],
               rollout_logprobs=[[], [0, 0, 0]], rollout_versions=[[], [0, 0, 0]])
    )  # fmt: skip
    assert first.trajectories[0].actions == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rewards": [[0.0], 0.0]}, "e0-i0-r0: 1 rewards for 2 response tokens"),
        ({"rewards": [None, 0.0]}, "e0-i0-r0: rewards must be numbers"),
        ({"rewards": ["right", 0.0]}, "e0-i0-r0: rewards must be numbers"),
        ({"rewards": ["10", 0.0]}, "e0-i0-r0: rewards must be numbers"),
        ({"loss_masks": [[1, 1], [1]]}, "e0-i1-r0: 1 loss_masks for 3 response tokens"),
        ({"loss_masks": [[1, 1], None]}, "e0-i1-r0: loss_masks must be numbers"),
        (
            {"rollout_logprobs": [[0.0], [0.0] * 3]},
            "e0-i0-r0: 1 rollout_logprobs for 2 response tokens",
        ),
        (
            {"rollout_logprobs": [[0.0, math.nan], [0.0] * 3]},
            "e0-i0-r0: rollout_logprobs of generated tokens must",
        ),
        (
            {"rollout_logprobs": [[0.0, -math.inf], [0.0] * 3]},
            "e0-i0-r0: rollout_logprobs of generated tokens must",
        ),
        ({"rollout_versions": [[0, 0], [0]]}, "e0-i1-r0: 1 rollout_versions for 3 response tokens"),
        (
            {"rollout_versions": [[0, math.nan], [0] * 3]},
            "e0-i0-r0: rollout_versions must be whole numbers",
        ),
        ({"prompt_token_ids": [[1], []]}, "e0-i1-r0: the prompt has no tokens"),
        ({"stop_reasons": ["stop"]}, "asked for 2 trajectories.*'stop_reasons': 1"),
        ({"rollout_versions": [[0, 0]]}, "asked for 2 trajectories.*'rollout_versions': 1"),
        ({"trajectory_metrics": []}, "asked for 2 trajectories.*'trajectory_metrics': 0"),
        ({"rewards": None}, "lacks rewards"),
    ],
)
def test_a_malformed_output_is_refused_naming_the_list_or_the_trajectory(changed, message):
    with pytest.raises(UserError, match=message):
        convert(output(**changed))


def test_what_an_observation_has_in_place_of_log_probabilities_does_not_matter():
    convert(output(rollout_logprobs=[[0.0, 0.0], [0.0, math.nan, 0.0]]))


def test_the_sequences_of_one_trajectory_are_rows_of_its_id_and_their_rewards_add_up():
    first, second = TrajectoryId(PromptId(0, 0), 0), TrajectoryId(PromptId(0, 1), 0)
    found = generator_output(
        [trajectory(action([t], 0.5), row=row) for row, t in enumerate([3, 4, 5])]
    )
    groups = convert(
        {
            **found,
            "trajectory_ids": [first, second, first],
            "stop_reasons": ["stop", "stop", "length"],
        }
    )
    assert [g.rewards for g in groups] == [[1.0], [0.5]]
    both = groups[0].trajectories[0]
    assert [[s.tokens.tolist() for s in sequence] for sequence in both.sequences] == [
        [[1, 2], [3]],
        [[1, 2], [5]],
    ]
    assert both.stop_reason == "length"


@pytest.mark.parametrize(
    ("ids", "problem"), [([0, 0], "lack e0-i1-r0"), ([0, 1, 2], "have e0-i2-r0, which was not")]
)
def test_trajectory_ids_must_be_those_that_were_asked_for(ids, problem):
    found = generator_output([trajectory(action([3])) for _ in ids])
    with pytest.raises(UserError, match=problem):
        convert({**found, "trajectory_ids": [TrajectoryId(PromptId(0, row), 0) for row in ids]})


@pytest.mark.parametrize("samples", [0, 2, 3])
def test_as_many_trajectories_as_asked_must_come(samples):
    with pytest.raises(UserError, match=f"asked for {2 * samples} trajectories"):
        convert(output(), samples)
