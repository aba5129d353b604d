"""The log-probabilities and values that the settings require before a batch is trained."""

from __future__ import annotations

from typing import Any

import pytest

from skyasync.algorithms.objective import Objective
from skyasync.trainer.learner import ScoringPlan
from tests.trainer.plans.parts import config


def plan_of(**settings: Any) -> ScoringPlan:
    cfg = config(**settings)
    return ScoringPlan.of(cfg, Objective(cfg.trainer.algorithm))


@pytest.mark.parametrize(
    "settings, one, several",
    [
        ({"trainer__algorithm__off_policy_correction": "none"}, False, True),
        ({"trainer__algorithm__off_policy_correction": "none", "trainer__algorithm__proximal_logprobs": "loglinear"},
         False, False),
        ({"trainer__algorithm__use_kl_in_reward": True}, True, True),
        ({"trainer__teacher__model__path": "a/teacher"}, True, True),
        ({"trainer__teacher__model__path": "a/teacher", "trainer__teacher__top_k": 8,
          "trainer__algorithm__off_policy_correction": "none"}, False, True),
    ],
)  # fmt: skip
def test_proximal_log_probabilities_are_computed_if_an_update_before_would_lose_them(
    settings: dict[str, Any], one: bool, several: bool
) -> None:
    plan = plan_of(**settings)
    assert (plan.needs_proximal(1), plan.needs_proximal(2)) == (one, several)


@pytest.mark.parametrize(
    "settings, field, value",
    [
        ({}, "reference", False),
        ({"trainer__algorithm__use_kl_loss": True}, "reference", True),
        ({}, "teacher", ""),
        ({"trainer__teacher__model__path": "a/teacher"}, "teacher", "logprobs"),
        ({"trainer__teacher__model__path": "a/teacher", "trainer__teacher__top_k": 8}, "teacher", "top_logprobs"),
        ({}, "values", False),
        ({"trainer__algorithm__advantage_estimator": "gae"}, "values", True),
        ({"trainer__algorithm__advantage_estimator": "gae"}, "values_by_policy", False),
        ({"trainer__algorithm__advantage_estimator": "gae", "trainer__critic__backbone": "shared"},
         "values_by_policy", True),
        ({"trainer__policy__router_replay": "R3"}, "experts", True),
    ],
)  # fmt: skip
def test_the_settings_say_what_is_asked(settings: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(plan_of(**settings), field) == value
