"""Ends without a failed process: too many failed episodes, and different log-probabilities. Modes of checkpoints."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from skyasync.errors import UserError
from skyasync.trainer import RayPPOTrainer
from tests.trainer.plans.parts import PLANS, Run, make_run

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)


@every_plan
@pytest.mark.parametrize("most", [0.2, 0.25], ids=["ends", "goes on"])
def test_too_many_episodes_given_up_end_a_run(plan: type[RayPPOTrainer], most: float) -> None:
    """Two of eight episodes of the second step fail: those of row 5."""
    run = make_run(plan, prompts=8, environment__max_given_up=most)
    original = run.generator.generate

    async def failing(batch: dict[str, Any]) -> dict[str, Any]:
        lost = [{"given_up": 1.0} if i.prompt.row == 5 else {} for i in batch["trajectory_ids"]]
        return await original(batch) | {"trajectory_metrics": lost}

    run.generator.generate = failing  # type: ignore[method-assign]
    if most == 0.25:
        assert len(run.train().tracker.rows) == 2
        return
    with pytest.raises(
        UserError,
        match=r"2 of \d episodes .* given up, e0-i5-r0 first, .*environment\.max_given_up",
    ):
        run.train()
    assert run.tracker.closed == run.timeline.closed == 1


def spiking(plan: type[RayPPOTrainer], **settings: Any) -> Run:
    """After the second step the engines' log-probabilities are far from the trainer's."""
    run = make_run(plan, prompts=16, trainer__spike_limits={"sync/logprob_gap": 0.5}, **settings)

    async def verify(version: int) -> dict[str, float]:
        return {"sync/logprob_gap": 0.75 if version == 2 else 0.0}

    run.sync.verify = verify  # type: ignore[method-assign]
    return run


@every_plan
def test_a_log_probability_difference_after_a_sync_warns(
    plan: type[RayPPOTrainer], caplog: pytest.LogCaptureFixture
) -> None:
    run = spiking(plan).train()
    assert run.tracker.of("spikes/count") == {2: 1.0}
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == [
        "step 2: sync/logprob_gap=0.75 is beyond its limit, 0.5 (trainer.spike_limits)"
    ]


@every_plan
def test_a_log_probability_difference_after_a_sync_ends_the_run(plan: type[RayPPOTrainer]) -> None:
    run = spiking(plan, trainer__on_spike="raise")
    with pytest.raises(
        UserError, match=r"step 2: sync/logprob_gap=0\.75 .*trainer\.on_spike=raise"
    ):
        run.train()
    assert run.sync.versions[:3] == [0, 1, 2] and len(run.tracker.of("policy/loss")) <= 2


@every_plan
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in background"])
def test_a_checkpoint_is_its_owners_alone_whatever_the_umask(
    plan: type[RayPPOTrainer], asynchronous: bool, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        make_run(
            plan,
            prompts=8,
            trainer__ckpt_path=str(tmp_path / "c"),
            trainer__ckpt_interval=1,
            trainer__ckpt_async=asynchronous,
        ).train()
    finally:
        os.umask(before)
    folders = sorted((tmp_path / "c").glob("step_*"))
    assert len(folders) == 2
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
