"""Long runs in simulation: the memory of a run does not grow with its length.

The plans and the trainer's parts are the real ones, with a run folder, a tracker, the timeline's file, the ledger and a
terminal that polls; tensors, engines and environments are left out.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

import pytest

from skyasync.callbacks import TrainerCallback
from skyasync.observability.progress import ProgressRecorder
from skyasync.observability.run_dir import RunDirectory
from skyasync.observability.timeline import Timeline
from skyasync.observability.trackers import MultiTracker
from skyasync.simulate.clock import run_virtual
from skyasync.simulate.run import make_trainer
from skyasync.simulate.settings import SimulationConfig
from skyasync.trainer.plans import PLANS

pytestmark = pytest.mark.slow

STEPS = 2000
SETTLED = 150  # steps; by then every bounded buffer is full
LAST = 50  # steps that are left out: they empty the pipeline
BLOCKS_PER_STEP = 1.0  # of Python's allocator; one list or dictionary kept per step is two or more


class Counting(TrainerCallback):
    """Allocated memory blocks after some of the steps; a terminal polls meanwhile."""

    def __init__(self, steps: int) -> None:
        self.recorder, self.blocks, self.at = (
            ProgressRecorder(steps),
            list[int](),
            (SETTLED, steps - LAST),
        )

    def on_step_end(self, trainer: object, metrics: dict[str, float]) -> None:
        step = trainer.global_step  # type: ignore[attr-defined]
        self.recorder.log(metrics, step)
        self.recorder.report(step - 1)
        if step in self.at:
            gc.collect()
            self.blocks.append(sys.getallocatedblocks())


@pytest.mark.matrix
@pytest.mark.parametrize("plan", ["fully_async", "sync", "one_step_off", "streamed"])
def test_what_a_run_holds_does_not_grow(plan: str, tmp_path: Path) -> None:
    cfg = SimulationConfig()
    (
        cfg.trainer.max_training_steps,
        cfg.trainer.train_batch_size,
        cfg.generator.n_samples_per_prompt,
    ) = STEPS, 2, 2
    cfg.generator.num_inference_engines, cfg.simulate.slots, cfg.simulate.length_mean = 2, 4, 100.0
    counting = Counting(STEPS)

    async def run() -> None:
        trainer = make_trainer(cfg, PLANS.find(plan))
        run_dir = RunDirectory(tmp_path, "run")
        trainer.context.tracker = MultiTracker(["jsonl"], run_dir)
        trainer.context.run_dir = run_dir
        clock = asyncio.get_running_loop().time
        trainer.context.phases.timeline = Timeline(run_dir.timeline, clock=clock, memory=64)
        trainer.callbacks.append(counting)
        await trainer.run()
        assert len((run_dir.path / "metrics.jsonl").read_text().splitlines()) == STEPS + 1

    run_virtual(run())
    first, last = counting.blocks
    assert (last - first) / (STEPS - LAST - SETTLED) < BLOCKS_PER_STEP
