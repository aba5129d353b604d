"""A run in one process that records its trajectories, and its replay on them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch

from skyasync.cli.replay_experiment import ReplayTrainer
from skyasync.config.schema import Config
from skyasync.observability.run_dir import RunDirectory
from skyasync.observability.trackers import JsonlTracker, TrackerContext
from skyasync.rollout.trajectory_files import files_of
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans import PLANS
from tests.trainer.plans.local_run import LocalRun


async def recorded(plan: type[RayPPOTrainer], cfg: Config, folder: Path) -> LocalRun:
    """A run with a folder."""
    cfg.trainer.dump_trajectories = True
    run = LocalRun(plan, cfg)
    _use_folder(run, folder)
    await run.train()
    return run


async def replayed(
    plan: type[RayPPOTrainer], cfg: Config, folder: Path, **attributes: Any
) -> LocalRun:
    """The replay of the run in this folder."""
    cfg.trainer.allow_uncorrected = True
    cfg.trainer.ckpt_rollouts = False
    cfg.trainer.dump_trajectories = False
    run = LocalRun(type("Replay", (ReplayTrainer, plan), {}), cfg)
    attributes = {"recorded": folder, "files": files_of(folder)} | attributes
    for name, value in attributes.items():
        setattr(run.trainer, name, value)
    run.trainer.eval_dataset = []
    _use_folder(run, folder.with_name(f"{folder.name}-replay"))
    await run.train()
    return run


async def both(plan: str, cfg: Config, folder: Path) -> tuple[LocalRun, LocalRun]:
    """A run and its replay."""
    again = deepcopy(cfg)
    run = await recorded(PLANS.find(plan), cfg, folder)
    return run, await replayed(PLANS.find(plan), again, folder)


def _use_folder(run: LocalRun, folder: Path) -> None:
    run_dir = RunDirectory(folder.parent, folder.name)
    run.trainer.context.run_dir = run_dir
    run.trainer.context.tracker = cast(Any, JsonlTracker(TrackerContext(run_dir, {})))


def weights(run: LocalRun) -> dict[str, torch.Tensor]:
    return run.dispatch.weights()  # type: ignore[no-any-return]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )
