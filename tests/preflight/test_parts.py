"""Checks of a run's own components before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partialmethod

import pytest

from skyasync.config.check import check_names
from skyasync.config.schema import Config
from skyasync.data.prompts import PromptBatch
from skyasync.errors import UserError
from skyasync.preflight.parts import check_plan_class
from skyasync.rollout.types import Group, Rollout
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


class Forgets(RayPPOTrainer):
    def filter_groups(self, groups: list[Group]) -> list[Group]:  # type: ignore[return]
        [group for group in groups if any(group.rewards)]


class ForgetsLater(RayPPOTrainer):
    async def generate(self, prompts: PromptBatch) -> Rollout:  # type: ignore[return]
        await super().generate(prompts)


class Yields(RayPPOTrainer):
    def remaining_prompts(self) -> Iterator[PromptBatch]:
        yield from super().remaining_prompts()

    async def save_checkpoint(self, *, patient: bool = True) -> None:
        """Nothing is needed of it."""


def test_a_method_without_its_return_is_an_error_that_names_it() -> None:
    check_plan_class(Yields)
    with pytest.raises(UserError, match=r"^Forgets\.filter_groups returns nothing, and must return: list\[Group\]$"):
        check_plan_class(Forgets)
    with pytest.raises(UserError, match=r"^ForgetsLater\.generate returns nothing, and must return: Rollout$"):
        check_plan_class(ForgetsLater)


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
