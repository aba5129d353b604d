"""A stopped and resumed run is the uninterrupted run: in the middle of an epoch and at its end, in both plans.

The dataset is two batches long, so the stop after step 3 is in the middle of the second epoch, and the one after step 4
at its end. Each resumed run raises ``max_training_steps``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.runs import Train, Trained

pytestmark = pytest.mark.slow


def in_three_parts(
    train: Train, plan: str, *settings: str, between: Callable[[Path], None] | None = None
) -> Trained:
    """Steps 1 to 3, then 4, then 5 and 6, in one run folder; ``between`` the last two gets the checkpoints."""

    def piece(steps: int) -> Trained:
        return train(
            f"trainer.plan={plan}", f"trainer.max_training_steps={steps}",
            "trainer.ckpt_interval=3", "trainer.resume_mode=latest", *settings,
        )  # fmt: skip

    _, second = piece(3), piece(4)
    if between is not None:
        between(second.folder / "checkpoints")
    return piece(6)


def damage_the_newest(checkpoints: Path) -> None:
    """A bit of the weights: the run resumes from the checkpoint before, and trains step 4 again."""
    (weights,) = (checkpoints / "step_000004" / "policy").iterdir()
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)


def test_sync_resumes_bit_for_bit_also_where_the_newest_checkpoint_is_damaged(
    train: Train, sync_run: Trained
) -> None:
    pieces = in_three_parts(train, "sync", between=damage_the_newest)
    assert pieces.prompts == sync_run.prompts
    for name in (
        "step",
        "policy/loss",
        "policy/grad_norm",
        "policy/tokens",
        "reward/mean",
        "sync/logprob_gap",
    ):
        assert pieces.series(name) == sync_run.series(name)


@pytest.mark.matrix
def test_one_step_off_resumes_with_the_right_prompts_and_fresh_samples(
    train: Train, one_step_off_run: Trained
) -> None:
    pieces = in_three_parts(train, "one_step_off", "trainer.ckpt_async=true")
    assert pieces.prompts == one_step_off_run.prompts
    assert pieces.series("step") == [1, 2, 3, 4, 5, 6]
    # The first step after each start is on fresh samples, the others are one step off.
    assert pieces.versions == [(1, {0}), (2, {0}), (3, {1}), (4, {3}), (5, {4}), (6, {4})]
    assert pieces.series("staleness/max") == [0, 1, 1, 0, 0, 1]
    for name in ("policy/loss", "policy/grad_norm", "reward/mean"):
        assert pieces.series(name)[:3] == one_step_off_run.series(name)[:3]
