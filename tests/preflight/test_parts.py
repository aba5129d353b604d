"""Checks of a run's own components before anything starts."""

from __future__ import annotations

from functools import partialmethod

import pytest

from skyasync.config.check import check_names
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.preflight.parts import check_plan_class
from skyasync.trainer import RayPPOTrainer


class ByPartialMethod(RayPPOTrainer):
    def _filter(self, groups: list[object], extra: int) -> list[object]:
        return groups[extra:]

    filter_groups = partialmethod(_filter, extra=1)


class ByValue(RayPPOTrainer):
    filter_groups = ()  # type: ignore[assignment]


def test_whatever_can_be_called_as_a_method_may_override_one() -> None:
    check_plan_class(ByPartialMethod)
    with pytest.raises(UserError, match=r"ByValue\.filter_groups has the name of a method of RayPPOTrainer"):
        check_plan_class(ByValue)


@pytest.mark.parametrize(
    ("group", "name", "answer"),
    [
        ("environment", "reward_unjudged", "unknown key 'environment.reward_unjudged': it is called "
         "environment.reward_on_timeout now"),
        ("trainer", "max_stalenes", "unknown key 'trainer.max_stalenes': did you mean trainer.max_staleness?"),
    ],
)  # fmt: skip
def test_an_attribute_that_is_no_setting_is_answered_as_on_the_command_line(group: str, name: str, answer: str) -> None:
    cfg = Config()
    check_names(cfg)
    setattr(getattr(cfg, group), name, 1)
    with pytest.raises(UserError) as caught:
        check_names(cfg)
    assert str(caught.value) == answer
