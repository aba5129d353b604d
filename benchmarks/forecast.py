"""``skyasync forecast`` against real runs: the order of 12 configurations by their time to a target reward, and the choice.

    uv run -m benchmarks.forecast [--seeds 1 2] [--target 0.68] [--processes 2] [--folder runs/forecast] [key=value ...]

The tiny model learns to sort (32 prompts x 8 samples, real engines, updates and weight syncs, one process per run). Two
cores cannot show how work is split, so a device's time is paced: a decode step of an engine (64 slots) takes at least
``TOKEN_S``, and training at least ``TRAIN_S`` per response token and trainer device. The cores compute meanwhile.
Four devices are two engines and two trainers, or three and one.

The pilot is one run of ``sync`` and one of ``fully_async`` at ``max_staleness=4``, of ``--pilot-steps`` steps with a
seed of their own. Every configuration then runs until the mean reward of ``WINDOW`` steps reaches the target. Its
measured time is these steps times the median seconds of its steps, mean over seeds: other load on the machine lengthens
some steps, and the median leaves them out. Finished runs in the folder are read again, not repeated.

Printed are both tables, Kendall's tau-b of the two orders, and what the choice costs beside the best measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.overlap import Rows
from benchmarks.staleness import train
from skyasync.callbacks import RunExtension
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import EngineConfig
from skyasync.trainer import RayPPOTrainer

SLOTS, TOKEN_S, TRAIN_S = 64, 0.08, 0.0009
SPLITS = ((2, 2), (3, 1))
PLANS = (("sync", 0), ("streamed", 0), ("one_step_off", 1), ("fully_async", 1), ("fully_async", 2), ("fully_async", 4))
PILOT_SEED, WINDOW, MOST_STEPS = 100, 9, 150
LEARNING_RATE = "trainer.policy.optimizer_config.lr=2e-4"


@dataclass(frozen=True)
class Job:
    plan: str
    bound: int
    engines: int
    trainers: int
    seed: int
    steps: int
    target: float
    folder: Path
    options: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.folder / f"{self.plan}_{self.bound}_{self.engines}+{self.trainers}_seed{self.seed}"


class PacedEngine(TransformersEngine):
    """Decodes as fast as an engine whose decode step takes ``TOKEN_S``."""

    async def start(self) -> None:
        await super().start()
        decode = self._decoder._decode

        def paced() -> Any:
            end = time.monotonic() + TOKEN_S
            result = decode()
            time.sleep(max(end - time.monotonic(), 0.0))
            return result

        self._decoder._decode = paced  # type: ignore[method-assign]


class PacedTraining(RayPPOTrainer):
    """Trains as fast as devices that take ``TRAIN_S`` per token, divided among them. Mixed in before a plan."""

    async def forward_backward(self, part: Any, *, complete: bool = True) -> None:
        seconds = int(part.loss_mask.sum()) * TRAIN_S / self.cfg.trainer.placement.policy_num_gpus_per_node
        await asyncio.gather(super().forward_backward(part, complete=complete), asyncio.sleep(seconds))


class StopAtTarget(RunExtension):
    def __init__(self, target: float) -> None:
        self._target, self._rewards = target, list[float]()

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._rewards.append(metrics["reward/mean"])
        if steps_to(self._target, self._rewards):
            trainer.stop("target reached")


def steps_to(target: float, rewards: list[float]) -> float:
    """The middle of the first ``WINDOW`` steps whose mean reward reaches the target; 0 if none do."""
    for end in range(WINDOW, len(rewards) + 1):
        if fmean(rewards[end - WINDOW : end]) >= target:
            return end - (WINDOW - 1) / 2
    return 0.0


def run(job: Job) -> Job:
    import torch

    from skyasync.config.load import dump_config

    if (job.path / "metrics.jsonl").is_file():
        return job
    torch.set_num_threads(1)
    cfg = configuration(job)
    engines = [
        PacedEngine(
            EngineConfig(cfg.trainer.policy.model.path, max_model_len=64, max_num_seqs=SLOTS, threads=1, seed=job.seed)
        )
        for _ in range(job.engines)
    ]
    job.path.mkdir(parents=True, exist_ok=True)
    (job.path / "config.yaml").write_text(dump_config(cfg))
    callbacks = [StopAtTarget(job.target)] if job.target else []
    asyncio.run(train(cfg, Rows(job.path / "metrics.jsonl"), engines, [PacedTraining], callbacks))
    return job


def configuration(job: Job) -> Any:
    from examples.tiny.model import build
    from skyasync.config import load_config

    bounds = {"one_step_off": "async_queue_size", "fully_async": "max_staleness"}
    settings = [f"trainer.{bounds[job.plan]}={job.bound}"] if job.plan in bounds else []
    return load_config([
        "--config", "examples/tiny/config.yaml", f"trainer.policy.model.path={build()}", f"trainer.plan={job.plan}",
        "trainer.train_batch_size=32", "generator.n_samples_per_prompt=8", f"trainer.max_training_steps={job.steps}",
        f"trainer.seed={job.seed}", f"generator.num_inference_engines={job.engines}", f"generator.max_num_seqs={SLOTS}",
        f"trainer.placement.policy_num_gpus_per_node={job.trainers}", "trainer.eval_interval=0",
        "trainer.eval_before_train=false", "trainer.save_samples=0", "trainer.policy.threads=1",
        "generator.backend=transformers", "trainer.policy.optimizer_config.scheduler=constant", LEARNING_RATE,
        *settings, *job.options,
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--target", type=float, default=0.74)
    parser.add_argument("--pilot-steps", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/forecast"))
    a, options = parser.parse_known_args()
    from examples.tiny.model import build

    build()
    own = (a.folder, tuple(options))
    jobs = [Job(plan, bound, *split, PILOT_SEED, a.pilot_steps, 0.0, *own) for plan, bound, split in (("sync",0,(2,2)),("fully_async",4,(3,1)))]
    jobs += [Job(plan, bound, *split, seed, MOST_STEPS, a.target, *own) for seed in a.seeds for plan, bound in PLANS for split in SPLITS]
    with multiprocessing.get_context("spawn").Pool(a.processes, maxtasksperchild=4) as pool:
        for job in pool.imap_unordered(run, jobs):
            rows = [json.loads(l) for l in (job.path / "metrics.jsonl").open()]
            rows = [r for r in rows if "reward/mean" in r]
            print(job.path.name, len(rows), steps_to(a.target, [r["reward/mean"] for r in rows]), f'{median(r["time/step_s"] for r in rows):.3f}', f'gen {median(r["time/generate_s"] for r in rows):.3f} train {median(r["time/train_s"] for r in rows):.3f} stal {fmean(r["staleness/mean"] for r in rows[5:]):.2f} rew {fmean(r["reward/mean"] for r in rows[-9:]):.3f} load {os.getloadavg()[0]:.1f} {time.strftime("%T")}', flush=True)


if __name__ == "__main__":
    main()
