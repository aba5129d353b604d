"""Every second of a run belongs to one thing: start, a step, evaluation, a checkpoint, an export, or the end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from skyasync.callbacks import TrainerCallback
from skyasync.inference.interface import EngineStats
from skyasync.observability.run_dir import RunDirectory
from skyasync.observability.timeline import Span
from skyasync.simulate.clock import run_virtual
from skyasync.trainer.plans import PLANS as PLANS_BY_NAME
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config
from tests.trainer.plans.parts import PLANS, Dispatch, Engines, RecordingTracker, Run, make_run
from tests.virtual_time import virtual_time

BETWEEN_STEPS = ("time/eval_s", "time/checkpoint_s", "time/export_s")
STEP_BEGIN_S, STEP_END_S = 0.2, 0.3

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)


class SlowEngines(Engines):
    """The answer to a request for counters takes long: the engines are busy. They count every second as work."""

    async def stats(self) -> list[EngineStats]:
        await asyncio.sleep(0.7)
        now = asyncio.get_running_loop().time()
        return [EngineStats(busy_s=now, generated_tokens=round(100 * now))]


class SlowDispatch(Dispatch):
    async def save(self, folder: Path) -> None:
        await asyncio.sleep(2.5)
        await super().save(folder)

    async def export(self, folder: Path, role: str = "policy") -> None:
        await asyncio.sleep(1.5)
        await super().export(folder, role)


class Sleeper(TrainerCallback):
    async def on_step_begin(self, trainer: Any, step: int) -> None:
        await asyncio.sleep(STEP_BEGIN_S)

    async def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        assert metrics["time/step_s"] > 0
        await asyncio.sleep(STEP_END_S)


class TimedTracker(RecordingTracker):
    def log(self, metrics: dict[str, float], step: int) -> None:
        super().log({**metrics, "time": asyncio.get_running_loop().time()}, step)


def slow_run(plan: Any, folder: Path, **settings: Any) -> tuple[Run, float]:
    """A finished run with everything that takes time, and its duration."""
    run = make_run(
        plan, prompts=40, eval_prompts=3, generating=[1.0, 3.0, 0.5], updating=[1.0, 2.0], callbacks=[Sleeper()],
        run_dir=RunDirectory(folder, "run"),
        **{"trainer__eval_interval": 3, "trainer__eval_before_train": True, "trainer__ckpt_interval": 4,
           "trainer__export_interval": 5, "trainer__max_staleness": 2, **settings},
    )  # fmt: skip
    run.engines.__class__ = SlowEngines
    run.dispatch.__class__ = SlowDispatch
    run.tracker.__class__ = TimedTracker
    run.timeline.elapsed_s = lambda: 0.0  # whose clock is a real one

    async def train() -> float:
        await run.trainer.run()
        return asyncio.get_running_loop().time()

    return run, run_virtual(train())


def seconds(row: dict[str, float]) -> float:
    """Of a step, and of what followed it."""
    return row.get("time/step_s", 0.0) + sum(row.get(name, 0.0) for name in BETWEEN_STEPS)


@every_plan
@pytest.mark.parametrize("eval_mode", ["overlap", "pause"])
def test_steps_evaluations_checkpoints_exports_and_start_add_up_to_the_runs_duration(
    plan, eval_mode, tmp_path
):
    run, duration_s = slow_run(plan, tmp_path, trainer__eval_mode=eval_mode)
    rows = dict(run.tracker.rows)
    assert list(rows) == list(range(11))
    assert (
        "time/eval_s" in rows[3] and "time/checkpoint_s" in rows[4] and "time/export_s" in rows[5]
    )
    finish_s = STEP_END_S  # of the last step, whose time has ended
    whole = rows[1]["time/start_s"] + sum(map(seconds, rows.values())) + finish_s
    assert whole == pytest.approx(duration_s, rel=1e-3)
    between = sum(seconds(rows[step]) for step in range(2, 11))
    assert between == pytest.approx(rows[10]["time"] - rows[1]["time"])


@every_plan
def test_phases_of_a_step_leave_out_an_export(plan, tmp_path):
    run, _ = slow_run(plan, tmp_path)
    for step, row in run.tracker.rows:
        if step:
            assert row["time/train_s"] <= row["time/step_s"] + 1e-6, step


@every_plan
def test_engines_that_work_all_the_time_are_never_idle_in_any_step(plan, tmp_path):
    run, _ = slow_run(plan, tmp_path)
    assert max(run.tracker.of("idle/engines").values()) == pytest.approx(0.0, abs=1e-6)
    assert all(
        rate == pytest.approx(100.0, rel=0.01)
        for rate in run.tracker.of("throughput/tokens_per_s").values()
    )


@every_plan
def test_the_counters_are_read_once_per_step(plan, tmp_path):
    run = make_run(plan, prompts=20).train()
    assert run.faults.calls["stats"] == 5 + 1


def test_a_batch_that_was_generated_during_an_evaluation_is_marked():
    run = make_run(
        AsyncRayPPOTrainer,
        prompts=28,
        eval_prompts=3,
        generating=[1.0],
        updating=[1.0],
        trainer__eval_interval=3,
    ).train()
    # After the third step's sync the fifth batch begins, and the evaluation, at the same time.
    assert run.tracker.of("rollout/in_evaluation") == {
        step: float(step == 5) for step in range(1, 8)
    }


@virtual_time
async def test_a_callback_of_a_steps_beginning_has_the_metrics_of_that_step():
    class Adds(TrainerCallback):
        def on_step_begin(self, trainer: Any, step: int) -> None:
            trainer.metrics["mine"] = float(step)

    run = make_run(PLANS[0], prompts=12, callbacks=[Adds()])
    await run.trainer.run()
    assert run.tracker.of("mine") == {1: 1.0, 2: 2.0, 3: 3.0}


# ---------------------------------------------------------------- real runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


class Stopwatch:
    """A tracker that notes when a row is logged."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.rows[step] = {"time": time.time(), **metrics}

    def close(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["sync", "one_step_off", "fully_async", "streamed", "colocated_async", "hybrid_async"]
)
async def test_in_a_real_run_the_rows_add_up_to_what_a_watch_says(
    plan: str, model: str, tmp_path: Path
) -> None:
    cfg = config(
        model,
        steps=16,
        train_length=40,
        plan=plan,
        max_staleness=2,
        eval_interval=5,
        ckpt_interval=6,
    )
    cfg.trainer.ckpt_path = str(tmp_path)
    cfg.generator.n_samples_per_prompt = 8
    cfg.trainer.placement.colocate_all = plan == "colocated_async"
    cfg.generator.hybrid_engines = int(plan == "hybrid_async")
    run = LocalRun(PLANS_BY_NAME[plan], cfg)
    run.trainer.context.tracker = watch = Stopwatch()
    began = time.time()
    await run.train()
    ended = time.time()
    first, *later = (watch.rows[step] for step in range(1, 17))
    assert sum(map(seconds, later)) == pytest.approx(later[-1]["time"] - first["time"], rel=0.01)
    whole = first["time/start_s"] + sum(map(seconds, watch.rows.values()))
    assert whole <= ended - began + 0.1  # what is left is the start and the end of the parts
    assert sum(row["time/interval_s"] for row in later) >= sum(row["time/step_s"] for row in later)
    if plan not in ("sync", "streamed"):  # whose trainer has no span while it generates
        assert idle_share(run.trainer.context.phases.timeline.spans()) < 0.02


def idle_share(spans: list[Span]) -> float:
    """The part of the trainer's lane without a span, from its first update to its last end of a step."""
    lane = sorted(
        (span.start_s, span.end_s) for span in spans if span.track == "trainer" and span.step
    )
    covered_s = 0.0
    until = lane[0][0]
    for start, end in lane:
        covered_s += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - covered_s / (until - lane[0][0])
