"""Losses, gradient norms and rewards of short real runs, for every plan and ten objectives.

``test_recorded.py`` fails if a change moves these figures. If it should move them, run ``python -m
tests.trainer.plans.recorded``, and give the reason in the commit.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from skyasync.config.schema import Config
from skyasync.trainer.plans import PLANS
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config

FILE = Path(__file__).with_name("recorded.json")
STEPS = 3
FIGURES = ("policy/loss", "policy/grad_norm", "reward/mean", "staleness/mean")

RECORDED_PLANS = ("sync", "one_step_off", "streamed", "fully_async")

#: Objective: (policy_loss_type, advantage_estimator, off_policy_correction).
OBJECTIVES = {
    "ppo": ("ppo", "grpo", "token_tis"),
    "ppo-loo": ("ppo", "rloo", "sequence_mask_tis"),
    "dual_clip": ("dual_clip", "grpo", "icepop"),
    "cispo": ("cispo", "dr_grpo", "none"),
    "gspo": ("gspo", "grpo", "sequence_tis"),
    "sapo": ("sapo", "maxrl", "token_tis"),
    "decoupled_ppo": ("decoupled_ppo", "grpo", "none"),
    "importance_sampling": ("importance_sampling", "opo", "none"),
    "topr": ("topr", "dr_grpo", "none"),
    "kimi15": ("kimi15", "rloo", "none"),
}


def settings(model: str, plan: str, objective: str) -> Config:
    loss, estimator, correction = OBJECTIVES[objective]
    cfg = config(model, steps=STEPS)
    cfg.trainer.eval_interval, cfg.trainer.allow_uncorrected = 0, True
    cfg.trainer.max_staleness = (
        0  # of fully_async: which of two samples is older depends on the clock
    )
    cfg.trainer.stream_groups = 2  # of streamed: sums in the prompts' order
    algorithm = cfg.trainer.algorithm
    algorithm.policy_loss_type, algorithm.advantage_estimator = loss, estimator
    algorithm.off_policy_correction = correction
    return cfg


async def figures(model: str, plan: str, objective: str) -> dict[str, list[float]]:
    run = await LocalRun(PLANS[plan], settings(model, plan, objective)).train()
    return {
        name: [row[name] for row in run.tracker.rows.values() if name in row] for name in FIGURES
    }


async def checkpointed(model: str, folder: Path, steps: int = 4, **trainer: object) -> LocalRun:
    """A run of ``one_step_off`` whose checkpoints have weights, optimizer, ledger and untrained rollouts."""
    cfg = config(model, steps=steps, ckpt_interval=1, ckpt_path=str(folder), **trainer)
    cfg.generator.sampling_params.seed = 5  # a request is sampled by its name, in any run
    return await LocalRun(PLANS["one_step_off"], cfg).train()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_llama(Path(folder), tied=False)
        recorded = {
            f"{plan} {objective}": asyncio.run(figures(model, plan, objective))
            for plan in RECORDED_PLANS
            for objective in OBJECTIVES
        }
    lines = [f" {json.dumps(name)}: {json.dumps(values)}" for name, values in recorded.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
