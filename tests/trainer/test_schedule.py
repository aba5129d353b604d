"""Schedules of evaluation and checkpoints: by steps, by minutes, by a step's metric (in simulation)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyasync.callbacks import TrainerCallback
from skyasync.errors import UserError
from skyasync.observability.run_dir import RunDirectory
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.checkpoint.checkpoints import read_best
from tests.trainer.plans.parts import Run, make_run


class Scores(TrainerCallback):
    """Each step's score, as a user's metric."""

    def __init__(self, *scores: float) -> None:
        self._scores = scores

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        metrics["my/score"] = self._scores[trainer.global_step - 1]


def run_of(folder: Path, *scores: float, **settings: Any) -> Run:
    """As many steps as there are scores."""
    usual = {
        "prompts": 4 * len(scores),
        "trainer__ckpt_path": str(folder),
        "trainer__eval_interval": 0,
    }
    return make_run(RayPPOTrainer, callbacks=[Scores(*scores)], **{**usual, **settings})


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def test_the_best_checkpoint_is_kept_in_addition_to_the_newest(tmp_path: Path) -> None:
    best = {"trainer__ckpt_best_metric": "my/score", "trainer__ckpt_keep": 1}
    run_of(tmp_path, 0.1, 0.5, 0.3, 0.5, 0.2, trainer__ckpt_interval=1, **best).train()
    assert steps(tmp_path) == [2, 5]
    found = read_best(tmp_path)
    assert found is not None and (found.folder, found.value) == ("step_000002", 0.5)


def test_a_better_step_is_saved_although_no_checkpoint_is_scheduled(tmp_path: Path) -> None:
    run_of(
        tmp_path,
        0.3,
        0.1,
        0.2,
        0.4,
        0.9,
        0.0,
        trainer__ckpt_best_metric="my/score",
        trainer__ckpt_keep=0,
    ).train()
    assert steps(tmp_path) == [
        1,
        4,
        5,
        6,
    ]  # 6 is the last step, which every run that saves has a checkpoint of


def test_less_may_be_better(tmp_path: Path) -> None:
    low = {
        "trainer__ckpt_best_metric": "my/score",
        "trainer__ckpt_best_mode": "min",
        "trainer__ckpt_keep": 1,
    }
    run_of(tmp_path, 0.3, 0.1, 0.2, **low).train()
    assert json.loads((tmp_path / "best.json").read_text()) == {
        "folder": "step_000002", "metric": "my/score", "value": 0.1
    }  # fmt: skip


def test_a_run_that_goes_on_knows_what_there_is_to_beat(tmp_path: Path) -> None:
    best = {"trainer__ckpt_best_metric": "my/score", "trainer__ckpt_keep": 1}
    first = run_of(tmp_path, 0.6, 0.2, 0.0, 0.0, trainer__ckpt_interval=1, **best)
    first.faults["generate", 3] = RuntimeError("power failure")
    with pytest.raises(RuntimeError):
        first.train()
    assert steps(tmp_path) == [1, 2]
    run_of(
        tmp_path,
        0.0,
        0.0,
        0.5,
        0.4,
        trainer__ckpt_interval=1,
        trainer__resume_mode="latest",
        **best,
    ).train()
    assert steps(tmp_path) == [1, 4]


def test_with_asynchronous_checkpoints_the_best_is_the_one_that_was_written(tmp_path: Path) -> None:
    in_background = {
        "trainer__ckpt_best_metric": "my/score",
        "trainer__ckpt_async": True,
        "trainer__ckpt_keep": 1,
    }
    run = run_of(tmp_path, 0.1, 0.5, 0.3, trainer__ckpt_interval=1, **in_background)
    run.faults["save", 2] = OSError("No space left on device")
    run.train()
    found = read_best(tmp_path)
    assert found is not None and found.folder == "step_000003"


def test_a_metric_that_is_none_is_one_line_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"ckpt_best_metric=my/skore: step 1 has no such metric: did you mean my/score",
    ):
        run_of(tmp_path, 0.1, 0.2, trainer__ckpt_best_metric="my/skore").train()


def test_a_score_needs_prompts_to_be_measured_on(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"ckpt_best_metric=eval/score needs held-out prompts: set data.val_data"
    ):
        run_of(tmp_path, 0.1, trainer__ckpt_best_metric="eval/score")


def test_minutes_count_from_the_last_time(tmp_path: Path) -> None:
    long = {"generating": [30.0], "updating": [9.0], "syncing": [1.0]}  # 40 s a step
    run = run_of(tmp_path, *[0.0] * 7, eval_prompts=2, trainer__ckpt_minutes=2.0, trainer__ckpt_keep=0,
                 trainer__eval_minutes=1.0, **long).train()  # fmt: skip
    assert steps(tmp_path) == [3, 5, 7]  # an evaluation takes another 30 s, so two steps are 140 s
    evaluated = [step for step, row in run.tracker.rows if "eval/score" in row]
    assert evaluated == [2, 3, 4, 5, 6, 7]  # after 80 s, then every 70


def test_the_policy_is_written_every_so_many_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path / "checkpoints", *[0.0] * 5, trainer__export_interval=2)
    run.trainer.context.run_dir = RunDirectory(tmp_path, "run")
    run.train()
    assert run.dispatch.exported == [
        tmp_path / "run" / "exports" / name for name in ("step_000002", "step_000004")
    ]
