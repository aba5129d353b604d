"""Checks of a run's own components before anything starts."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path

import pytest

from skyasync.config.check import check_names
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.preflight.parts import check_parts, check_plan_class, check_sampler
from skyasync.trainer import RayPPOTrainer


class ByPartialMethod(RayPPOTrainer):
    def _filter(self, groups: list[object], extra: int) -> list[object]:
        return groups[extra:]

    filter_groups = partialmethod(_filter, extra=1)


class ByValue(RayPPOTrainer):
    filter_groups = ()  # type: ignore[assignment]


def test_whatever_can_be_called_as_a_method_may_override_one() -> None:
    check_plan_class(ByPartialMethod)
    with pytest.raises(
        UserError, match=r"ByValue\.filter_groups has the name of a method of RayPPOTrainer"
    ):
        check_plan_class(ByValue)


SAMPLERS_OF_A_USER = """
from skyasync.data.samplers import PromptSampler

class Right(PromptSampler):
    def __init__(self, cfg):
        self.groups = 0

class NoBase:
    def __init__(self, cfg):
        pass

class Without(PromptSampler):
    def __init__(self):
        pass

class Rewards(PromptSampler):
    def observe(self, prompt):
        pass
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Rihgt", r"unknown attribute 'Rihgt': did you mean 'Right'"),
        ("NoBase", r"must be a subclass of skyasync\.data\.samplers\.PromptSampler"),
        ("Without", r"__init__\(self\) must take \(self, cfg\)"),
        ("Rewards", r"observe\(self, prompt\) must take \(self, prompt, rewards\)"),
    ],
)
def test_a_sampler_that_cannot_work_is_found_before_the_run(
    name: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(SAMPLERS_OF_A_USER)
    check_sampler(f"{file}:Right")
    with pytest.raises(UserError, match=problem):
        check_sampler(f"{file}:{name}")


def test_a_tracker_that_takes_no_context_is_found_before_the_run(tmp_path: Path) -> None:
    cfg, file = Config(), tmp_path / "own.py"
    file.write_text(
        "class Right:\n    def __init__(self, context): ...\n\nclass Wrong:\n    pass\n"
    )
    cfg.trainer.logger = ["jsonl", "console", f"{file}:Right"]
    check_parts(cfg, [])
    cfg.trainer.logger.append(f"{file}:Wrong")
    with pytest.raises(
        UserError,
        match=r"own\.py:Wrong' must be made from a context: def __init__\(self, context\)",
    ):
        check_parts(cfg, [])


@pytest.mark.parametrize(
    ("group", "name", "answer"),
    [
        ("environment", "reward_on_timeot",
         "unknown key 'environment.reward_on_timeot': did you mean environment.reward_on_timeout?"),
        ("trainer", "max_stalenes", "unknown key 'trainer.max_stalenes': did you mean trainer.max_staleness?"),
    ],
)  # fmt: skip
def test_an_attribute_that_is_no_setting_is_answered_as_on_the_command_line(
    group: str, name: str, answer: str
) -> None:
    cfg = Config()
    check_names(cfg)
    setattr(getattr(cfg, group), name, 1)
    with pytest.raises(UserError) as caught:
        check_names(cfg)
    assert str(caught.value) == answer
