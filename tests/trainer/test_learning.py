"""From groups to the training batch: reward shaping, truncated responses, and their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyasync.trainer import RayPPOTrainer
from tests.trainer.plans.parts import Run, make_run


def one_step(truncated: frozenset[int] = frozenset(), **algorithm: Any) -> Run:
    """A synchronous step on four groups of two, rewards 0 and 1; the reference is one nat below the policy."""
    settings = {f"trainer__algorithm__{name}": value for name, value in algorithm.items()}
    run = make_run(RayPPOTrainer, prompts=4, **settings)
    run.generator.truncated = truncated

    async def ask(role: str, method: str, batch: Any) -> torch.Tensor:
        return torch.where(batch.loss_mask, -1.5 if role == "reference" else -0.5, 0.0)

    run.dispatch.ask = ask  # type: ignore[method-assign]
    return run.train()


def scores(run: Run) -> list[float]:
    return run.dispatch.batches[0].rewards.sum(1).tolist()


def test_rewards_are_shaped_before_the_kl_penalty_is_subtracted() -> None:
    run = one_step(
        reward_scale=2.0,
        reward_clip=1.5,
        use_kl_in_reward=True,
        kl_estimator_type="k1",
        kl_loss_coef=0.25,
    )
    assert scores(run) == [-0.5, 1.0] * 4  # 0 and 1.5, minus 0.25 for each of two tokens
    assert run.tracker.of("reward/shaped_mean") == {1: 0.75}
    assert run.tracker.of("reward/mean") == {1: 0.5}


def test_nothing_is_logged_of_shaping_that_does_nothing() -> None:
    assert one_step().tracker.of("reward/shaped_mean") == {}


def test_masked_truncated_responses_have_no_loss_token_and_stay_in_the_baseline() -> None:
    run = one_step(frozenset({0}), truncated_responses="mask", advantage_estimator="dr_grpo")
    batch = run.dispatch.batches[0]
    assert batch.loss_mask.sum(1).tolist() == [0, 2] * 4
    assert batch.advantages.sum(1).tolist() == [0, 1.0] * 4  # 1 - 0.5 on two tokens


def test_masked_truncated_responses_keep_their_length_in_the_optimal_baseline() -> None:
    batch = one_step(
        frozenset({0}), truncated_responses="mask", advantage_estimator="opo"
    ).dispatch.batches[0]
    assert batch.advantages.sum(1).tolist() == [0, 1.0] * 4  # 1 - 0.5: both have two tokens


def test_what_a_loss_draws_depends_on_the_seed_and_the_step_alone() -> None:
    settings: dict[str, Any] = {"policy_loss_type": "clip_cov", "advantage_estimator": "dr_grpo"}
    settings |= {
        "clip_cov__clip_ratio": 0.5,
        "clip_cov__clip_cov_lb": -1e9,
        "clip_cov__clip_cov_ub": 1e9,
    }
    torch.manual_seed(1)
    first = one_step(**settings).dispatch.batches[0].selection
    before = torch.random.get_rng_state()
    again = one_step(**settings).dispatch.batches[0].selection
    assert torch.equal(first, again) and 0 < int(first.sum()) < first.numel()
    assert torch.equal(torch.random.get_rng_state(), before), (
        "the process's own random state is not used"
    )


def test_dropped_truncated_responses_are_counted_and_leave_the_baseline() -> None:
    run = one_step(frozenset({0}), truncated_responses="drop", advantage_estimator="dr_grpo")
    assert len(run.dispatch.batches[0]) == 4
    assert not run.dispatch.batches[0].advantages.any()
    assert run.tracker.of("response/dropped") == {1: 4}


def test_a_group_of_truncated_responses_only_is_left_out() -> None:
    run = one_step(frozenset({0, 1}), truncated_responses="drop")
    assert run.dispatch.batches == [] and run.trainer.global_step == 1


@pytest.mark.parametrize(("key", "expected"), [("train", [0, 1]), ("zero", [0, 0])])
def test_a_truncated_response_may_lose_its_reward(key: str, expected: list[float]) -> None:
    assert scores(one_step(frozenset({1}), truncated_responses=key)) == expected * 4
