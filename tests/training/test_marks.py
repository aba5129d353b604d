"""Workers die, and the run goes on from what its engines hold (``trainer.restart_from=engines``); on virtual time."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyasync.observe.jsonl import read_rows
from skyasync.observe.run_dir import RunDirectory
from skyasync.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.plans.streamed import StreamedRayPPOTrainer
from skyasync.state.ledger import audit
from skyasync.trainer import RayPPOTrainer
from tests.plans.parts import PLANS, Run, make_run, stream

STEPS = 6
DEATH = ZeroDivisionError("a worker's process has died")


class Holding:
    """What the scripted engines and workers lack: an engine's weights are the number of updates behind them."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder, self.handed = run, folder, list[int]()
        engines, dispatch = vars(run.engines), vars(run.dispatch)
        engines["held_versions"], engines["hand_back"] = self.held_versions, self.hand_back
        dispatch["call"] = self.call

    async def held_versions(self) -> dict[int, int]:
        return {0: -1, 1: self.run.engines.version}  # one in which an update has failed, and one that holds weights

    async def hand_back(self, engine: int, folder: str) -> str:
        assert engine == 1
        self.handed.append(self.run.engines.version)
        path = self.folder / "handed"
        path.write_text(str(self.run.engines.version))
        return str(path)

    async def call(self, role: str, method: str, path: str) -> list[bool]:
        assert role == "policy" and path == str(self.folder / "handed")
        if method == "release":
            (self.folder / "handed").unlink()
        else:
            assert method == "take_weights"
            self.run.dispatch.weights = int((self.folder / "handed").read_text())
        return [False]


def one(folder: Path, plan: type[RayPPOTrainer], **settings: Any) -> Run:
    run_dir = RunDirectory(folder, "run", resume=True)
    usual = {"prompts": 4 * STEPS, "trainer__restart_from": "engines", "trainer__ckpt_keep": 0}
    return make_run(plan, run_dir=run_dir, **{**usual, **settings})


def dies(run: Run) -> Run:
    with pytest.raises(ZeroDivisionError):
        run.train()
    return run


def goes_on(folder: Path, former: Run, plan: type[RayPPOTrainer], **settings: Any) -> tuple[Run, Holding]:
    run = one(folder, plan, **settings)
    run.engines.version = former.engines.version
    run.trainer.marks.former = former.trainer.marks.survived()
    return run, Holding(run, folder)


def all_is_well(folder: Path, first: Run, second: Run) -> None:
    """No step is missing or there twice, each prompt has ended once, and nothing is left of the file."""
    assert [step for step, _ in (*first.tracker.rows, *second.tracker.rows)] == [*range(1, STEPS + 1)]
    ended = audit(read_rows(folder / "run" / "ledger.jsonl"))
    assert ended.keys() == set(map(str, stream(4 * STEPS)))
    assert {len(ends) for ends in ended.values()} == {1}
    assert second.dispatch.weights == STEPS
    assert not (folder / "handed").exists()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
@pytest.mark.parametrize("saved", [0, 2])
def test_a_death_in_training_costs_the_update_under_way_and_nothing_that_was_rolled_out(
    saved: int, plan: type[RayPPOTrainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    each = 4 if plan is StreamedRayPPOTrainer else 1  # parts of a step, one of each group
    first = one(tmp_path, plan, trainer__ckpt_interval=saved, generating=range(1, each + 1), updating=[0.1])
    first.faults["update", 3 * each + 1] = DEATH
    dies(first)
    assert first.engines.version == 3
    second, holding = goes_on(tmp_path, first, plan, trainer__ckpt_interval=saved,
                              trainer__resume_mode="latest" if saved else "none")  # fmt: skip
    second.train()
    all_is_well(tmp_path, first, second)
    assert holding.handed == [3] and second.sync.versions[0] == 3
    assert second.dispatch.scheduled == [3, 4, 5], "the learning rate goes on where it was"
    if plan not in (FullyAsyncRayPPOTrainer, StreamedRayPPOTrainer):  # there others are in flight
        asked = Counter(first.generator.asked + second.generator.asked)
        assert {asked[prompt] for prompt in stream(24)[12:16]} == {1}, "the batch of the step that died is kept"
    moments = "are those of the checkpoint of step 2, 1 steps old" if saved else "begin anew, as there is no checkpoint"
    assert f"goes on from version 3, as engine 1 holds it; the optimizer's moments {moments}" in caplog.text


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
@pytest.mark.parametrize("taken", [False, True])
def test_a_step_whose_weights_no_engine_has_taken_is_made_again_with_its_batch_and_no_other(
    taken: bool, plan: type[RayPPOTrainer], tmp_path: Path
) -> None:
    first = one(tmp_path, plan)
    first.faults["sync", 5] = DEATH  # of the step 4: the first sync is of none
    if taken:
        publish, sync = first.sync.sync, vars(first.sync)

        async def taken_by_one(version: int, *paused: Any) -> None:
            try:
                await publish(version, *paused)
            except ZeroDivisionError:
                first.engines.version = version
                raise

        sync["sync"] = taken_by_one
    dies(first)
    second, holding = goes_on(tmp_path, first, plan)
    second.train()
    all_is_well(tmp_path, first, second)
    assert holding.handed == [4 if taken else 3]
    assert (second.trained[:4] == stream(24)[12:16]) is not taken
    assert not set(stream(24)[12:16]) & set(second.generator.asked), "it was rolled out, and is kept"


def test_with_a_checkpoint_of_the_same_step_its_weights_and_moments_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "skyasync")
    first = one(tmp_path, RayPPOTrainer, trainer__ckpt_interval=1)
    first.faults["update", 4] = DEATH
    dies(first)
    second, holding = goes_on(tmp_path, first, RayPPOTrainer, trainer__ckpt_interval=1, trainer__resume_mode="latest")
    second.train()
    all_is_well(tmp_path, first, second)
    assert holding.handed == [] and "the engines hold version 3, as the workers do" in caplog.text
    assert first.trained[:12] + second.trained == stream(24)


def test_engines_that_hold_less_than_the_checkpoint_are_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"trainer__ckpt_interval": 1, "trainer__sync_interval": 2}
    first = one(tmp_path, RayPPOTrainer, **settings, trainer__allow_uncorrected=True)
    first.faults["update", 4] = DEATH
    dies(first)
    assert first.engines.version == 2
    settings |= {"trainer__resume_mode": "latest", "trainer__allow_uncorrected": True}
    second, holding = goes_on(tmp_path, first, RayPPOTrainer, **settings)
    second.train()
    all_is_well(tmp_path, first, second)
    assert holding.handed == [] and "no engine holds weights as new as those of step 3" in caplog.text


def test_workers_that_die_again_before_the_first_sync_cost_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first = one(tmp_path, RayPPOTrainer)
    first.faults["update", 4] = DEATH
    dies(first)
    second, _ = goes_on(tmp_path, first, RayPPOTrainer)
    second.faults["sync", 1] = DEATH
    dies(second)
    third, holding = goes_on(tmp_path, second, RayPPOTrainer)
    third.train()
    all_is_well(tmp_path, first, third)
    assert holding.handed == [3] and len(third.generator.asked) == 8
