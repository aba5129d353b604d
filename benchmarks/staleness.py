"""Final reward by objective and staleness, with and without correction: does it fall, and does a
correction help?

    uv run -m benchmarks.staleness [--seeds 3] [--steps 40] [--plan one_step_off] [--processes 2]
    [--markdown out.md] uv run -m benchmarks.staleness --objectives "ppo + token_tis" --control none
    divided auto

The tiny model learns to sort (32 prompts x 8 samples). With ``one_step_off`` staleness is exactly
the queue's depth (``trainer.async_queue_size``; 0 is the synchronous plan), by the tokens' policy
versions; with ``fully_async`` it is at most ``trainer.max_staleness``, and its measured value is
printed with each run. Real engine, real updates, real weight syncs, all in one process per run. The
result is the mean held-out reward (256 prompts, temperature 1) of the last two evaluations, ten
steps apart; the table shows mean and range over seeds.

``--control`` repeats the table with other step sizes: ``divided`` is the learning rate over 1 +
staleness, and ``auto`` is ``trainer.staleness_control=auto``. Further ``key=value`` arguments are
settings of all runs; with ``trainer.policy.optimizer_config.lr=...`` they make a grid. If
``trainer.policy.optimizer_config.max_grad_cosine`` is set, the table and each run's line also have
the mean cosine of consecutive gradients (1 only measures it).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

DEPTHS = (0, 1, 2, 4, 8)
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "ppo": ("policy_loss_type=ppo", "off_policy_correction=none"),
    "ppo + token_tis": ("policy_loss_type=ppo", "off_policy_correction=token_tis"),
    "ppo + icepop": ("policy_loss_type=ppo", "off_policy_correction=icepop"),
    "decoupled_ppo": ("policy_loss_type=decoupled_ppo", "off_policy_correction=auto"),
    "rollout_is": ("policy_loss_type=rollout_is", "off_policy_correction=auto"),
}
CONTROLS = {
    "none": "",
    "divided": ", learning rate / (1 + staleness)",
    "auto": ", staleness_control=auto",
}


@dataclass(frozen=True)
class Job:
    objective: str
    depth: int
    seed: int
    steps: int
    plan: str
    control: str = "none"
    options: tuple[str, ...] = ()


class Memory:
    """A tracker that keeps the evaluations, and what the table shows of each step."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.staleness: list[float] = []
        self.cosines: list[float] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if "policy/grad_cosine" in metrics:
            self.cosines.append(metrics["policy/grad_cosine"])
        if "staleness/mean" in metrics:
            self.staleness.append(metrics["staleness/mean"])
        if "eval/score" in metrics:
            self.scores.append(metrics["eval/score"])

    def close(self) -> None:
        pass


def run(job: Job) -> dict[str, Any]:
    """One training run in this process."""
    import torch

    torch.set_num_threads(1)
    identity = {
        "objective": job.objective,
        "control": job.control,
        "depth": job.depth,
        "seed": job.seed,
    }
    memory = Memory()
    asyncio.run(train(configuration(job), memory))
    return identity | {
        "score": fmean(memory.scores[-2:]), "first": memory.scores[0], "staleness": fmean(memory.staleness),
        **({"cosine": fmean(memory.cosines)} if memory.cosines else {}),
    }  # fmt: skip


async def train(
    cfg: Any,
    tracker: Any,
    engines: Sequence[Any] = (),
    mixins: Sequence[type] = (),
    callbacks: Sequence[Any] = (),
) -> None:
    """A run of ``cfg`` in this process; by default with one embedded engine, and the plan's class
    as it is."""
    from transformers import AutoTokenizer

    from skyasync.data.datasets import load_prompts
    from skyasync.envs.pool import local_pool
    from skyasync.inference.backends.transformers.engine import TransformersEngine
    from skyasync.inference.client import InferenceClient
    from skyasync.inference.interface import EngineConfig
    from skyasync.rollout.chat import ChatTokenizer
    from skyasync.rollout.generator import EpisodeGenerator
    from skyasync.trainer.plans import PLANS
    from skyasync.weight_sync.sync import WeightSync
    from skyasync.workers.dispatch import LocalDispatch

    path = cfg.trainer.policy.model.path
    tokenizer = AutoTokenizer.from_pretrained(path)
    datasets = [load_prompts(s, cfg, tokenizer) for s in (cfg.data.train_data, cfg.data.val_data)]
    engines = engines or [
        TransformersEngine(EngineConfig(path, max_model_len=64, threads=1, seed=cfg.trainer.seed))
    ]
    client = InferenceClient(list(engines))
    dispatch = LocalDispatch(cfg)
    await client.start()
    plan: Any = type("Plan", (*mixins, PLANS[cfg.trainer.plan]), {})
    trainer = plan(
        cfg, tracker, tokenizer, datasets[0], client, EpisodeGenerator(client, local_pool(), tokenizer, 64),
        eval_dataset=datasets[1], callbacks=list(callbacks),
    )  # fmt: skip
    probe = [
        ChatTokenizer(tokenizer).prompt(prompt.messages).tolist() for prompt in datasets[0][:4]
    ]
    trainer.attach(dispatch, WeightSync(dispatch, client, probe, 1e-3))
    try:
        await trainer.run()
    finally:
        await asyncio.gather(client.shutdown(), dispatch.shutdown())


def configuration(job: Job) -> Any:
    from examples.tiny.model import build
    from skyasync.config import load_config

    settings = [f"trainer.algorithm.{setting}" for setting in OBJECTIVES[job.objective]]
    if job.depth:
        if job.plan == "one_step_off":
            bound = "async_queue_size"
        else:
            bound = "max_staleness"
        settings += [
            f"trainer.plan={job.plan}",
            f"trainer.{bound}={job.depth}",
            "trainer.allow_uncorrected=true",
        ]
    if job.control == "auto":
        settings.append("trainer.staleness_control=auto")
    cfg = load_config([
        "--config", "examples/tiny/config.yaml", f"trainer.policy.model.path={build()}", "trainer.train_batch_size=32",
        "generator.n_samples_per_prompt=8", f"trainer.max_training_steps={job.steps}", f"trainer.seed={job.seed}",
        "trainer.eval_interval=10", "trainer.save_samples=0", "trainer.policy.threads=1",
        "generator.backend=transformers", "trainer.policy.optimizer_config.scheduler=constant",
        *settings, *job.options,
    ])  # fmt: skip
    if job.control == "divided":
        cfg.trainer.policy.optimizer_config.lr /= 1 + job.depth
    return cfg


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: objectives by depth, mean and range over seeds."""
    depths = sorted({r["depth"] for r in results})
    lines = [
        "| objective | " + " | ".join(f"staleness {d}" for d in depths) + " |",
        "|---" * (len(depths) + 1) + "|",
    ]
    for objective, control in dict.fromkeys((r["objective"], r["control"]) for r in results):
        own = [r for r in results if (r["objective"], r["control"]) == (objective, control)]
        cells = []
        for depth in depths:
            scores = [r["score"] for r in own if r["depth"] == depth]
            cosines = [r["cosine"] for r in own if r["depth"] == depth and "cosine" in r]
            cells.append(
                f"{fmean(scores):.2f} ({min(scores):.2f} to {max(scores):.2f})" if scores else ""
            )
            cells[-1] += f", cosine {fmean(cosines):.2f}" if cosines else ""
        lines.append(f"| {objective}{CONTROLS[control]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plan", default="one_step_off", choices=["one_step_off", "fully_async"])
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument(
        "--objectives", nargs="+", default=list(OBJECTIVES), choices=list(OBJECTIVES)
    )
    parser.add_argument("--control", nargs="+", default=["none"], choices=list(CONTROLS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    arguments, options = parser.parse_known_args()
    from examples.tiny.model import build

    build()
    jobs = [
        Job(objective, depth, seed, arguments.steps, arguments.plan, control, tuple(options))
        for seed in range(arguments.seeds)
        for depth in arguments.depths
        for objective in arguments.objectives
        for control in arguments.control
    ]
    results = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes, maxtasksperchild=8) as pool:
        for result in pool.imap_unordered(run, jobs):
            results.append(result)
            print(f"{len(results)}/{len(jobs)} {json.dumps(result)}", flush=True)
    order = [list(OBJECTIVES), list(CONTROLS)]
    text = table(
        sorted(
            results, key=lambda r: (order[0].index(r["objective"]), order[1].index(r["control"]))
        )
    )
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
