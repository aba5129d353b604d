"""``skyasync forecast`` against real runs: the order of 12 configurations by their time to a target, and the choice.

    uv run -m benchmarks.forecast [--seeds 1 2 3] [--pilot-seeds 100 101] [--processes 2]
    uv run -m benchmarks.forecast --task addition --seeds 1 --pilot-seeds 100  # a process takes up to 9 GB

The tiny model learns to sort, or SmolLM2-135M-Instruct to add (real engines, updates and weight syncs, one process per
run). Two cores cannot show how work is split, so a device's time is paced: a decode step of an engine takes at least
``token_s``, and training at least ``train_s`` per response token and trainer device. The cores compute meanwhile. Four
devices are one, two or three engines, and the others are trainers.

Pilot: a run of ``sync`` and two of ``fully_async`` with ``max_staleness`` 2 and 4, where training is the bottleneck, so
that samples are as stale as the bound allows. Their seeds are not those of the measured runs.

Measured: the time to the target is the steps to it times the seconds of a step.

- Steps: a run until the mean reward of ``WINDOW`` steps reaches the target; mean over seeds. What ``sync`` and
  ``one_step_off`` learn does not depend on the split, so they run on one, and without waiting.
- Seconds: the median step of a short run of every configuration, with all paces ``slower`` times as long and the
  result divided by it, so that other load on the machine matters less. The addition's paces are slow already, and its
  runs of ``fully_async`` to the target tell their seconds.

Printed are forecast and measurement, Kendall's tau-b of their orders, and how far the choice is from the best measured.
Finished runs in the folder are read, not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.overlap import Rows
from benchmarks.staleness import train
from skyasync.callbacks import RunExtension
from skyasync.cli.forecast import LAWS
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import EngineConfig
from skyasync.observability.jsonl import read_rows
from skyasync.simulate.forecast import Candidate, choose, configuration_of, forecast
from skyasync.simulate.learning import fit, read_pilot, resampled
from skyasync.trainer import RayPPOTrainer

SPLITS = ((1, 3), (2, 2), (3, 1))
PLANS = (("sync", None), ("one_step_off", None), ("fully_async", 2), ("fully_async", 4))
ANY_SPLIT = ("sync", "one_step_off")
PILOTS: tuple[tuple[str, int | None, int, int], ...] = (
    ("sync", None, 2, 2),
    ("fully_async", 2, 3, 1),
    ("fully_async", 4, 3, 1),
)
FILLING, WINDOW = 3, 9


@dataclass(frozen=True)
class Task:
    """``token_s`` is of a decode step of one engine, ``train_s`` of a response token on one trainer device."""

    settings: tuple[str, ...]
    model: str  # module whose build() makes or finds it
    max_model_len: int
    slots: int
    token_s: float
    train_s: float
    target: float
    pilot_steps: int
    timed_steps: int
    most_steps: int
    slower: float


TASKS = {
    "sort": Task(
        ("--config", "examples/tiny/config.yaml", "trainer.train_batch_size=32", "generator.n_samples_per_prompt=8",
         "trainer.policy.optimizer_config.lr=2e-4"),
        "examples.tiny.model", max_model_len=64, slots=64, token_s=0.08, train_s=0.0009, target=0.74,
        pilot_steps=40, timed_steps=10, most_steps=100, slower=3.0,
    ),
    "addition": Task(
        ("--config", "examples/smollm2/config.yaml"),
        "examples.smollm2.model", max_model_len=96, slots=8, token_s=0.55, train_s=0.084, target=0.65,
        pilot_steps=24, timed_steps=7, most_steps=60, slower=1.0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """``target`` 0: run all steps. ``pace`` multiplies the devices' times; 0 does not wait."""

    task: str
    plan: str
    bound: int | None
    engines: int
    trainers: int
    seed: int
    steps: int
    target: float
    pace: float
    folder: Path  # of all jobs of its kind

    @property
    def configuration(self) -> tuple[str, int | None, int, int]:
        return self.plan, self.bound, self.engines, self.trainers

    @property
    def path(self) -> Path:
        return self.folder / f"{self.plan}_{self.bound or 0}_{self.engines}+{self.trainers}_seed{self.seed}"

    def series(self, metric: str) -> list[float]:
        return [row[metric] for row in read_rows(self.path / "metrics.jsonl") if metric in row]


class PacedEngine(TransformersEngine):
    """Decodes as fast as an engine whose decode step takes ``token_s``."""

    token_s: float

    async def start(self) -> None:
        await super().start()
        decode = self._decoder._decode

        def paced() -> Any:
            end = time.monotonic() + self.token_s
            result = decode()
            time.sleep(max(end - time.monotonic(), 0.0))
            return result

        self._decoder._decode = paced  # type: ignore[method-assign]


class PacedTraining(RayPPOTrainer):
    """Trains as fast as devices that take ``train_s`` per token, divided among them. Mixed in before a plan."""

    train_s: float

    async def forward_backward(self, part: Any, *, complete: bool = True) -> None:
        seconds = int(part.loss_mask.sum()) * self.train_s / self.cfg.trainer.placement.policy_num_gpus_per_node
        await asyncio.gather(super().forward_backward(part, complete=complete), asyncio.sleep(seconds))


class StopAtTarget(RunExtension):
    def __init__(self, job: Job) -> None:
        self._job, self._rewards = job, list[float]()

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._rewards.append(metrics["reward/mean"])
        if steps_to(self._job.target, self._rewards) < self._job.steps:
            trainer.stop("target reached")


def steps_to(target: float, rewards: list[float]) -> float:
    """The middle of the first ``WINDOW`` steps whose mean reward reaches the target; infinite if none do."""
    for end in range(WINDOW, len(rewards) + 1):
        if fmean(rewards[end - WINDOW : end]) >= target:
            return end - (WINDOW - 1) / 2
    return math.inf


def run(job: Job) -> Job:
    import torch

    from skyasync.config.load import dump_config

    if (job.path / "metrics.jsonl").is_file():
        return job
    torch.set_num_threads(1)
    cfg, task = configuration(job), TASKS[job.task]
    config = EngineConfig(
        cfg.trainer.policy.model.path,
        max_model_len=task.max_model_len,
        max_num_seqs=task.slots,
        threads=1,
        seed=job.seed,
    )
    engines = [PacedEngine(config) for _ in range(job.engines)]
    PacedEngine.token_s, PacedTraining.train_s = task.token_s * job.pace, task.train_s * job.pace
    job.path.mkdir(parents=True, exist_ok=True)
    (job.path / "config.yaml").write_text(dump_config(cfg))
    callbacks = [StopAtTarget(job)] if job.target else []
    asyncio.run(train(cfg, Rows(job.path / "metrics.jsonl"), engines, [PacedTraining], callbacks))
    return job


def configuration(job: Job) -> Any:
    from skyasync.config import load_config

    task, model = TASKS[job.task], import_module(TASKS[job.task].model).build()
    bound = [] if job.bound is None else [f"trainer.max_staleness={job.bound}"]
    return load_config([
        *task.settings, f"trainer.policy.model.path={model}", f"trainer.plan={job.plan}",
        f"trainer.max_training_steps={job.steps}", f"trainer.seed={job.seed}",
        f"generator.num_inference_engines={job.engines}", f"generator.max_num_seqs={task.slots}",
        f"trainer.placement.policy_num_gpus_per_node={job.trainers}", "trainer.eval_interval=0",
        "trainer.eval_before_train=false", "trainer.save_samples=0", "trainer.policy.threads=1",
        "generator.backend=transformers", "trainer.policy.optimizer_config.scheduler=constant", *bound,
    ])  # fmt: skip


def jobs(options: argparse.Namespace) -> dict[str, list[Job]]:
    name, folder, task = options.task, options.folder / options.task, TASKS[options.task]
    configurations = [(plan, bound, engines, trainers) for plan, bound in PLANS for engines, trainers in SPLITS]
    return {
        "pilot": [
            Job(name, *one, seed, task.pilot_steps, 0.0, 1.0, folder / "pilot")
            for seed in options.pilot_seeds
            for one in PILOTS
        ],
        "steps": [
            Job(name, *one, seed, task.most_steps, task.target, float(one[0] not in ANY_SPLIT), folder / "steps")
            for seed in options.seeds
            for one in configurations
            if one[0] not in ANY_SPLIT or one[2:] == (2, 2)
        ],
        "seconds": [
            Job(name, *one, 0, task.timed_steps, 0.0, task.slower, folder / "seconds")
            for one in configurations
            if task.slower != 1 or one[0] in ANY_SPLIT
        ],
    }


def measured(found: dict[str, list[Job]], task: Task) -> dict[Candidate, tuple[float, float]]:
    """Steps to the target, and seconds of a step."""
    timed = {job.configuration: job for job in found["steps"] + found["seconds"]}  # the last one counts
    results = {}
    for configuration, job in timed.items():
        same = [
            other
            for other in found["steps"]
            if other.configuration == configuration or (other.plan == job.plan and job.plan in ANY_SPLIT)
        ]
        steps = fmean(min(steps_to(task.target, one.series("reward/mean")), task.most_steps) for one in same)
        results[Candidate(*configuration)] = steps, median(job.series("time/step_s")[FILLING:]) / job.pace
    return results


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Tau-b (Kendall 1945): ties count for neither side."""
    pairs = list(combinations(range(len(a)), 2))
    signs = [[(x[i] > x[j]) - (x[i] < x[j]) for i, j in pairs] for x in (a, b)]
    agreeing = sum(x * y for x, y in zip(*signs, strict=True))
    return agreeing / math.sqrt(math.prod(sum(map(abs, own)) for own in signs))


def report(found: dict[str, list[Job]], options: argparse.Namespace) -> list[str]:
    task = TASKS[options.task]
    real = measured(found, task)
    pilots = [read_pilot(read_rows(job.path / "metrics.jsonl"), "reward/mean", job.path.name) for job in found["pilot"]]
    law = fit(pilots, 1.0)
    cfg = configuration_of(found["pilot"][0].path, [])
    rows = forecast(cfg, list(real), law, resampled(pilots, law, LAWS), task.target)
    lines = [f"{law}", ""]
    heads = "plan | bound | engines + trainers | s/step | staleness | steps | minutes (90%) | s/step | steps | minutes"
    lines += [f"| {heads} |", "|---" * 10 + "|"]
    times = []
    for row in rows:
        one, (steps, step_s) = row.candidate, real[row.candidate]
        times.append(steps * step_s / 60)
        more = ">" if steps == task.most_steps else ""
        forecasted = f"{row.step_s:.2f} | {row.staleness:.1f} | {row.steps:.0f} | {row.minutes:.2f}"
        lines.append(
            f"| `{one.plan}` | {one.bound or ''} | {one.engines} + {one.trainers} | {forecasted} ({row.low:.2f} to "
            f"{row.high:.2f}) | {step_s:.2f} | {more}{steps:.0f} | {more}{times[-1]:.2f} |"
        )
    chosen = times[rows.index(choose(rows))]
    return [
        *lines, "", f"Kendall's tau-b {kendall_tau([row.minutes for row in rows], times):.2f}; the choice takes "
        f"{chosen / min(times):.2f} times the best measured",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="sort", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--pilot-seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/forecast"))
    options = parser.parse_args()
    import_module(TASKS[options.task].model).build()
    found = jobs(options)
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for job in pool.imap_unordered(run, [job for kind in found.values() for job in kind]):
            step_s = median(job.series("time/step_s")[FILLING:]) / (job.pace or 1.0)
            steps = steps_to(TASKS[options.task].target, job.series("reward/mean"))
            staleness = fmean(job.series("staleness/mean")[FILLING:])
            print(
                f"{job.path.parent.name} {job.path.name}: {step_s:.3f} s per step, {steps:.0f} steps to the target, "
                f"mean staleness {staleness:.2f}, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print("\n".join(report(found, options)))


if __name__ == "__main__":
    main()
