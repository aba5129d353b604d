"""Settings of evaluation that cannot work are found before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyasync.config import ConfigError, load_config
from skyasync.errors import UserError
from skyasync.preflight.data import check_evaluation
from skyasync.preflight.parts import check_environment


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["trainer.ckpt_best_metric=eval/score"],
            r"ckpt_best_metric=eval/score needs held-out prompts",
        ),
        (
            ["trainer.ckpt_best_metric=eval/scoer"],
            r"eval/scoer: there is no such metric: did you mean eval/score\?",
        ),
        (
            ["trainer.eval_interval=1"],
            r"trainer\.eval_interval=1 has no effect without held-out prompts",
        ),
        (
            ["trainer.eval_minutes=5"],
            r"trainer\.eval_minutes=5 has no effect without held-out prompts",
        ),
    ],
)
def test_evaluation_without_prompts_or_of_a_misspelled_metric_is_rejected(
    overrides: list[str], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        check_evaluation(load_config(overrides))


def test_evaluation_with_prompts_and_a_default_interval_without_are_accepted() -> None:
    check_evaluation(load_config([]))
    check_evaluation(load_config(["trainer.eval_interval=0"]))
    prompts = ["data.val_data=[rows.jsonl]", "trainer.eval_interval=1"]
    for name in ("eval/score", "eval/pass@4", "eval/held/score", "eval/env/solved"):
        check_evaluation(load_config([*prompts, f"trainer.ckpt_best_metric={name}"]))


def test_an_environment_that_is_none_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from skyasync import BaseTextEnv\n"
        "class Nothing: ...\n"
        "class Inherited(BaseTextEnv): ...\n"
        "class Right(BaseTextEnv):\n    def step(self, action): ...\n"
        "class Foreign:\n    def reset(self): ...\n    def step(self, action): ...\n"
        "def made(env_config, extras):\n    return Right(env_config, extras)\n"
    )
    for name in ("Right", "Foreign", "made"):
        check_environment(f"{file}:{name}")
    for name in ("Nothing", "Inherited"):
        with pytest.raises(
            UserError, match=rf"{name}' does not define step\(action\): make {name} a subclass of"
        ):
            check_environment(f"{file}:{name}")


def test_greedy_samples_are_not_compared_with_each_other() -> None:
    greedy = "generator.sampling_params.temperature=0"
    with pytest.raises(
        ConfigError, match=r"temperature=0 gives all samples of a prompt the same response"
    ):
        load_config([greedy])
    load_config([greedy, "trainer.algorithm.advantage_estimator=gae"])
