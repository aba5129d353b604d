"""A run in one process, and its replay by the schedule that it has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer

from skyasync.cli.replay_experiment import ReplayTrainer
from skyasync.config.schema import Config
from skyasync.envs.pool import local_pool
from skyasync.observability.run_dir import RunDirectory
from skyasync.observability.trackers import JsonlTracker, TrackerContext
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.reenactment import ScheduledClient
from skyasync.trainer import RayPPOTrainer
from tests.trainer.plans.local_run import CHAT, LocalRun


async def recorded(plan: type[RayPPOTrainer], cfg: Config, folder: Path, **parts: Any) -> LocalRun:
    """A run with a folder."""
    run = LocalRun(plan, cfg, **parts)
    _with_folder(run, folder)
    await run.train()
    return run


async def replayed(plan: type[RayPPOTrainer], cfg: Config, run: Path, **attributes: Any) -> LocalRun:
    """The replay of the run in this folder."""
    cfg.trainer.allow_uncorrected, cfg.trainer.ckpt_rollouts = True, False
    again = LocalRun(type("Replay", (ReplayTrainer, plan), {}), cfg)
    tokenizer = AutoTokenizer.from_pretrained(cfg.trainer.policy.model.path)
    tokenizer.chat_template = CHAT
    client = ScheduledClient(again.client, tokenizer)
    limits = EpisodeLimits(on_nonfinite=cfg.trainer.on_nonfinite)
    again.trainer.generator = EpisodeGenerator(cast(Any, client), local_pool(), tokenizer, 64, limits)
    vars(again.trainer).update({"recorded": run, "scheduled": client} | attributes)
    again.trainer.eval_dataset = []
    _with_folder(again, run.with_name(f"{run.name}-replay"))
    await again.train()
    return again


def _with_folder(run: LocalRun, folder: Path) -> None:
    run_dir = RunDirectory(folder.parent, folder.name)
    run.trainer.context.run_dir = run_dir
    run.trainer.context.tracker = cast(Any, JsonlTracker(TrackerContext(run_dir, {})))


def weights(run: LocalRun) -> dict[str, torch.Tensor]:
    return run.dispatch.weights()  # type: ignore[no-any-return]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
