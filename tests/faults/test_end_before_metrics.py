"""A run that ends after a checkpoint and before the step's line in the metrics has that line after the restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyasync.callbacks import TrainerCallback
from skyasync.observability.jsonl import read_rows
from skyasync.observability.run_dir import RunDirectory
from skyasync.observability.trackers import MultiTracker
from skyasync.trainer import RayPPOTrainer
from tests.trainer.plans.parts import PLANS, Run, make_run


class EndsAtCheckpoint(TrainerCallback):
    """Ends the process as soon as there is a checkpoint."""

    def on_checkpoint(self, trainer: Any, folder: Path) -> None:
        raise ZeroDivisionError


def run_in(plan: type[RayPPOTrainer], folder: Path, **settings: Any) -> Run:
    run_dir = RunDirectory(folder, "run", resume=True)
    run = make_run(plan, prompts=16, run_dir=run_dir, trainer__ckpt_interval=2, **settings)
    run.trainer.context.tracker = MultiTracker(["jsonl"], run_dir)
    return run


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
def test_a_step_that_a_checkpoint_has_is_in_the_metrics(
    plan: type[RayPPOTrainer], tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        run_in(plan, tmp_path, callbacks=[EndsAtCheckpoint()]).train()
    run_in(plan, tmp_path, trainer__resume_mode="latest").train()
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all("policy/loss" in row for row in rows)
