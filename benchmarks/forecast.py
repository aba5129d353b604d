"""``skyasync forecast`` against real runs: the order of 12 configurations by their time to a target, and the choice.

    uv run -m benchmarks.forecast [--seeds 1 2 3] [--pilot-seeds 100 101] [--target 0.74] [--processes 2] [--slower 3]

The tiny model learns to sort (32 prompts x 8 samples, real engines, updates and weight syncs, one process per run). Two
cores cannot show how work is split, so a device's time is paced: a decode step of an engine (64 slots) takes at least
``TOKEN_S``, and training at least ``TRAIN_S`` per response token and trainer device. The cores compute meanwhile. Four
devices are one, two or three engines, and the others are trainers.

Pilot: a run of ``sync`` and two of ``fully_async`` with ``max_staleness`` 2 and 4, where training is the bottleneck, so
that samples are as stale as the bound allows. Their seeds are not those of the measured runs.

Measured: the time to the target is the steps to it times the seconds of a step.

- Steps: a run until the mean reward of ``WINDOW`` steps reaches the target; mean over seeds. What ``sync`` and
  ``one_step_off`` learn does not depend on the split, so they run on one. A run ends after ``MOST_STEPS``.
- Seconds: the median step of a short run of every configuration, with all paces ``--slower`` times as long and the
  result divided by it, so that other load on the machine matters less.

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
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.overlap import Rows
from benchmarks.staleness import train
from skyasync.callbacks import RunExtension
from skyasync.cli.forecast import LAWS, pilot_configuration
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import EngineConfig
from skyasync.observability.jsonl import read_rows
from skyasync.simulate.forecast import Candidate, choose, forecast
from skyasync.simulate.learning import fit, read_pilot, resampled
from skyasync.trainer import RayPPOTrainer

SLOTS, TOKEN_S, TRAIN_S = 64, 0.08, 0.0009
SPLITS = ((1, 3), (2, 2), (3, 1))
PLANS = (("sync", None), ("one_step_off", None), ("fully_async", 2), ("fully_async", 4))
ANY_SPLIT = ("sync", "one_step_off")
PILOTS = (("sync", None, 2, 2), ("fully_async", 2, 3, 1), ("fully_async", 4, 3, 1))
PILOT_STEPS, TIMED_STEPS, FILLING, WINDOW, MOST_STEPS = 40, 10, 3, 9, 100


@dataclass(frozen=True)
class Job:
    """``target`` 0: run all steps. ``pace`` multiplies the devices' times."""

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
    def path(self) -> Path:
        return self.folder / f"{self.plan}_{self.bound or 0}_{self.engines}+{self.trainers}_seed{self.seed}"

    def series(self, metric: str) -> list[float]:
        return [row[metric] for row in read_rows(self.path / "metrics.jsonl") if metric in row]


class PacedEngine(TransformersEngine):
    """Decodes as fast as an engine whose decode step takes ``token_s``."""

    token_s = TOKEN_S

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

    train_s = TRAIN_S

    async def forward_backward(self, part: Any, *, complete: bool = True) -> None:
        seconds = int(part.loss_mask.sum()) * self.train_s / self.cfg.trainer.placement.policy_num_gpus_per_node
        await asyncio.gather(super().forward_backward(part, complete=complete), asyncio.sleep(seconds))


class StopAtTarget(RunExtension):
    def __init__(self, target: float) -> None:
        self._target, self._rewards = target, list[float]()

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._rewards.append(metrics["reward/mean"])
        if steps_to(self._target, self._rewards) < MOST_STEPS:
            trainer.stop("target reached")


def steps_to(target: float, rewards: list[float]) -> float:
    """The middle of the first ``WINDOW`` steps whose mean reward reaches the target; ``MOST_STEPS`` if none do."""
    for end in range(WINDOW, len(rewards) + 1):
        if fmean(rewards[end - WINDOW : end]) >= target:
            return end - (WINDOW - 1) / 2
    return MOST_STEPS


def run(job: Job) -> Job:
    import torch

    from skyasync.config.load import dump_config

    if (job.path / "metrics.jsonl").is_file():
        return job
    torch.set_num_threads(1)
    cfg = configuration(job)
    model = cfg.trainer.policy.model.path
    config = EngineConfig(model, max_model_len=64, max_num_seqs=SLOTS, threads=1, seed=job.seed)
    engines = [PacedEngine(config) for _ in range(job.engines)]
    PacedEngine.token_s, PacedTraining.train_s = TOKEN_S * job.pace, TRAIN_S * job.pace
    job.path.mkdir(parents=True, exist_ok=True)
    (job.path / "config.yaml").write_text(dump_config(cfg))
    callbacks = [StopAtTarget(job.target)] if job.target else []
    asyncio.run(train(cfg, Rows(job.path / "metrics.jsonl"), engines, [PacedTraining], callbacks))
    return job


def configuration(job: Job) -> Any:
    from examples.tiny.model import build
    from skyasync.config import load_config

    bound = [] if job.bound is None else [f"trainer.max_staleness={job.bound}"]
    return load_config([
        "--config", "examples/tiny/config.yaml", f"trainer.policy.model.path={build()}", f"trainer.plan={job.plan}",
        "trainer.train_batch_size=32", "generator.n_samples_per_prompt=8", f"trainer.max_training_steps={job.steps}",
        f"trainer.seed={job.seed}", f"generator.num_inference_engines={job.engines}", f"generator.max_num_seqs={SLOTS}",
        f"trainer.placement.policy_num_gpus_per_node={job.trainers}", "trainer.eval_interval=0",
        "trainer.eval_before_train=false", "trainer.save_samples=0", "trainer.policy.threads=1",
        "generator.backend=transformers", "trainer.policy.optimizer_config.scheduler=constant",
        "trainer.policy.optimizer_config.lr=2e-4", *bound,
    ])  # fmt: skip


def jobs(options: argparse.Namespace) -> dict[str, list[Job]]:
    folder, slower, target = options.folder, options.slower, options.target
    configurations = [(plan, bound, *split) for plan, bound in PLANS for split in SPLITS]
    return {
        "pilot": [
            Job(*one, seed, PILOT_STEPS, 0.0, 1.0, folder / "pilot") for seed in options.pilot_seeds for one in PILOTS
        ],
        "seconds": [Job(*one, 0, TIMED_STEPS, 0.0, slower, folder / "seconds") for one in configurations],
        "steps": [
            Job(plan, bound, engines, trainers, seed, MOST_STEPS, target, 1.0, folder / "steps")
            for seed in options.seeds
            for plan, bound, engines, trainers in configurations
            if plan not in ANY_SPLIT or (engines, trainers) == (2, 2)
        ],
    }


def measured(found: dict[str, list[Job]], slower: float, target: float) -> dict[Candidate, tuple[float, float]]:
    """Steps to the target, and seconds of a step."""
    results = {}
    for timed in found["seconds"]:
        same = [
            job
            for job in found["steps"]
            if (job.plan, job.bound) == (timed.plan, timed.bound)
            and (job.plan in ANY_SPLIT or job.engines == timed.engines)
        ]
        steps = fmean(steps_to(target, job.series("reward/mean")) for job in same)
        candidate = Candidate(timed.plan, timed.bound, timed.engines, timed.trainers)
        results[candidate] = steps, median(timed.series("time/step_s")[FILLING:]) / slower
    return results


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Tau-b (Kendall 1945): ties count for neither side."""
    pairs = list(combinations(range(len(a)), 2))
    signs = [[(x[i] > x[j]) - (x[i] < x[j]) for i, j in pairs] for x in (a, b)]
    agreeing = sum(x * y for x, y in zip(*signs, strict=True))
    return agreeing / math.sqrt(math.prod(sum(map(abs, own)) for own in signs))


def report(found: dict[str, list[Job]], options: argparse.Namespace) -> list[str]:
    real = measured(found, options.slower, options.target)
    pilots = [read_pilot(read_rows(job.path / "metrics.jsonl"), "reward/mean", job.path.name) for job in found["pilot"]]
    law = fit(pilots, 1.0)
    rows = forecast(
        pilot_configuration(found["pilot"][0].path, []), list(real), law, resampled(pilots, law, LAWS), options.target
    )
    lines = [f"{law}", ""]
    heads = "plan | bound | engines + trainers | s/step | staleness | steps | minutes (90%) | s/step | steps | minutes"
    lines += [f"| {heads} |", "|---" * 10 + "|"]
    times = []
    for row in rows:
        one, (steps, step_s) = row.candidate, real[row.candidate]
        times.append(steps * step_s / 60)
        more = ">" if steps == MOST_STEPS else ""
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--pilot-seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--target", type=float, default=0.74)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--slower", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/forecast"))
    options = parser.parse_args()
    from examples.tiny.model import build

    build()
    found = jobs(options)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for job in pool.imap_unordered(run, [job for kind in found.values() for job in kind]):
            step_s = median(job.series("time/step_s")[FILLING:]) / job.pace
            steps = steps_to(options.target, job.series("reward/mean"))
            staleness = fmean(job.series("staleness/mean")[FILLING:])
            print(
                f"{job.path.parent.name} {job.path.name}: {step_s:.3f} s per step, {steps:.0f} steps to the target, "
                f"mean staleness {staleness:.2f}, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print("\n".join(report(found, options)))


if __name__ == "__main__":
    main()
