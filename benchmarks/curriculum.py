"""Samples to the same reward with and without a curriculum, on a task of mixed difficulty.

    uv run -m benchmarks.curriculum [--seeds 3] [--steps 24] [--processes 2] [--markdown out.md]
    [key=value ...]

The tiny model sorts digits. A quarter of the prompts are short (4 digits), which it soon always
gets right, half are too long (11 to 14), which it never gets right, and a quarter are in between (6
to 8); so are the held-out ones. ``uniform`` trains each prompt once a pass; ``pass_rate`` is
``data.sampler=pass_rate`` with the number of digits as the pool. Real engine, real updates, one
process per run, 32 prompts x 8 samples per step.

The target is the reward of ``uniform`` at its end: the mean of its last two evaluations. The output
has the samples that each sampler needed to reach it (linear between evaluations), their ratio by
seed, and its median.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.staleness import train

SHARES = {(4, 4): 1, (6, 8): 1, (11, 14): 2}
PROMPTS = 32
SAMPLES = 8
INTERVAL = 4
SETTINGS = {"uniform": (), "pass_rate": ("data.sampler=pass_rate", "data.sampler_pool_key=digits")}


def rows(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Different sorting prompts of the mixture, each with its number of digits."""
    from skyasync.examples.tiny.tasks import Question

    rng = random.Random(seed)
    chosen = dict[str, dict[str, Any]]()
    while len(chosen) < count:
        (shortest, longest), *_ = rng.choices(list(SHARES), list(SHARES.values()))
        digits = "".join(rng.choices("0123456789", k=rng.randint(shortest, longest)))
        question = Question("sort", f"Sort the digits: {digits}", "".join(sorted(digits)))
        if question.split == split:
            chosen[question.text] = question.row() | {"digits": len(digits)}
    return list(chosen.values())


def train_prompts() -> list[dict[str, Any]]:
    return rows("train", 2048, seed=1)


def val_prompts() -> list[dict[str, Any]]:
    return rows("held_out", 256, seed=2)


class Scores:
    """A tracker that keeps the evaluations."""

    def __init__(self) -> None:
        self.by_samples: dict[int, float] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if "eval/score" in metrics:
            self.by_samples[step * PROMPTS * SAMPLES] = metrics["eval/score"]

    def close(self) -> None:
        pass


def run(job: tuple[str, int, int, tuple[str, ...]]) -> dict[int, float]:
    """Reward by samples, of one training run in this process."""
    import torch

    torch.set_num_threads(1)
    scores = Scores()
    asyncio.run(train(configuration(*job), scores))
    return scores.by_samples


def configuration(sampler: str, seed: int, steps: int, options: tuple[str, ...]) -> Any:
    from examples.tiny.model import build
    from skyasync.config import load_config

    return load_config([
        "--config", "examples/tiny/config.yaml", f"trainer.policy.model.path={build()}",
        f"trainer.train_batch_size={PROMPTS}", f"generator.n_samples_per_prompt={SAMPLES}",
        f"trainer.max_training_steps={steps}", f"trainer.seed={seed}", f"trainer.eval_interval={INTERVAL}",
        "trainer.save_samples=0", "trainer.policy.threads=1", "generator.backend=transformers",
        "trainer.policy.optimizer_config.scheduler=constant", "generator.sampling_params.max_generate_length=15",
        "generator.eval_n_samples_per_prompt=2",
        "data.train_data=[benchmarks.curriculum:train_prompts]", "data.val_data=[benchmarks.curriculum:val_prompts]",
        *SETTINGS[sampler], *options,
    ])  # fmt: skip


def samples_to(target: float, scores: dict[int, float]) -> float:
    """Linear between the evaluations; infinite if the target is not reached."""
    before = (0, min(scores.values()))
    for samples, score in sorted(scores.items()):
        if score >= target:
            if score > before[1]:
                share = (target - before[1]) / (score - before[1])
            else:
                share = 1.0
            return before[0] + share * (samples - before[0])
        before = samples, score
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--markdown", help="file for the table")
    args, options = parser.parse_known_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    jobs = [(sampler, seed, args.steps, tuple(options)) for seed in seeds for sampler in SETTINGS]
    with multiprocessing.get_context("spawn").Pool(args.processes, maxtasksperchild=1) as pool:
        results = dict(
            zip([job[:2] for job in jobs], pool.map(run, jobs, chunksize=1), strict=True)
        )
    lines = [
        "| seed | before | target | samples, uniform | samples, pass_rate | ratio | last, uniform | last, pass_rate |"
    ]
    lines.append("|---" * 8 + "|")
    ratios = []
    for seed in seeds:
        uniform = results["uniform", seed]
        chosen = results["pass_rate", seed]
        ends = [
            fmean([scores[samples] for samples in sorted(scores)[-2:]])
            for scores in (uniform, chosen)
        ]
        taken = [samples_to(ends[0], scores) for scores in (uniform, chosen)]
        ratios.append(taken[1] / taken[0])
        lines.append(
            f"| {seed} | {uniform[0]:.2f} | {ends[0]:.2f} | {taken[0]:,.0f} | {taken[1]:,.0f} | {ratios[-1]:.2f} | "
            f"{ends[0]:.2f} | {ends[1]:.2f} |"
        )
    lines.append(f"\nmedian ratio {median(ratios):.2f}")
    print("\n".join(lines))
    for (sampler, seed), scores in results.items():
        print(sampler, seed, " ".join(f"{score:.2f}" for _, score in sorted(scores.items())))
    if args.markdown:
        Path(args.markdown).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
