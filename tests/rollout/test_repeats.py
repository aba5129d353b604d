"""The fraction of samples that are equal to another of their group."""

from __future__ import annotations

from skyasync.rollout.metrics import repeated_samples
from skyasync.rollout.types import Group, PromptId, Segment, Trajectory, TrajectoryId
from tests.rollout.episodes import prompt


def trajectory(sample: int, *actions: list[int], asked: int = 1) -> Trajectory:
    segments = [
        Segment("action", tokens, [-3.0] * len(tokens), [0] * len(tokens)) for tokens in actions
    ]
    return Trajectory(TrajectoryId(PromptId(0, 0), sample), [Segment("prompt", [asked]), *segments])


def test_a_sample_is_all_of_its_actions_and_one_without_a_response_does_not_count() -> None:
    asked = prompt(0, "any")
    same = Group(asked, [trajectory(i, [5] * 8, [6] * 8) for i in range(3)])
    split_differently = Group(
        asked,
        [trajectory(0, [5, 6], [7]), trajectory(1, [5], [6, 7]), trajectory(2), trajectory(3)],
    )
    assert repeated_samples([same]) == {"response/repeated": 2 / 3}
    assert repeated_samples([split_differently]) == {"response/repeated": 0.0}
    assert repeated_samples([same, split_differently]) == {"response/repeated": 2 / 5}
    assert repeated_samples([Group(asked, [trajectory(0)])]) == {}


def test_the_same_answer_to_another_question_is_no_repeat() -> None:
    """An environment may give each sample another prompt."""
    asked_differently = Group(prompt(0, "any"), [trajectory(i, [5] * 8, asked=i) for i in range(4)])
    assert repeated_samples([asked_differently]) == {"response/repeated": 0.0}
