"""Runs with real policy and engine that train again on their recorded trajectories."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import pytest

from skyasync.cli.replay import replay
from skyasync.cli.replay_experiment import ReplayExperiment, ReplayTrainer
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.rollout.trajectory_files import files_of, read
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans import PLANS
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config
from tests.trainer.plans.replayed import recorded, replayed, same, weights

pytestmark = pytest.mark.slow

FULLY_ASYNC = PLANS.find("fully_async")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


def settings(model: str, steps: int = 5, **trainer: Any) -> Config:
    """Settings of a run whose requests are in flight while weights change."""
    trainer = {"max_staleness": 3} | trainer
    cfg = config(model, steps=steps, eval_interval=0, allow_uncorrected=True, **trainer)
    cfg.generator.sampling_params.max_generate_length = 80  # the context ends them first
    return cfg


def difference(run: LocalRun) -> str:
    return cast(ReplayTrainer, run.trainer).difference


async def test_an_asynchronous_run_is_trained_again_to_the_same_weights(
    model: str, tmp_path: Path
) -> None:
    run = await recorded(FULLY_ASYNC, settings(model), tmp_path / "run")
    again = await replayed(FULLY_ASYNC, settings(model), tmp_path / "run")
    assert same(weights(run), weights(again)) and difference(again) == ""
    rows = read_rows(tmp_path / "run-replay" / "metrics.jsonl")
    assert [(row["step"], row["replay/same"]) for row in rows] == [
        (step, 1.0) for step in range(1, 6)
    ]


class InTwoParts(StreamedRayPPOTrainer):
    """The last two groups of a batch arrive late, in another order."""

    async def roll_out(self, prompts: Any, step: int | None = None) -> Any:
        rolled_out = await super().roll_out(prompts, step)
        place = self._place = getattr(self, "_place", 0) + 1
        while place % 4 in (0, 3) and len(self._arrivals.accepted) < (2 if place % 4 == 0 else 3):
            await self._rollout_ended.wait()
            await asyncio.sleep(0)
        return rolled_out


async def test_a_plan_that_trains_in_parts_has_the_same_parts(model: str, tmp_path: Path) -> None:
    run = await recorded(InTwoParts, settings(model, steps=3), tmp_path / "run")
    assert all(len(read(file).batches) > 1 for file in files_of(tmp_path / "run"))
    again = await replayed(StreamedRayPPOTrainer, settings(model, steps=3), tmp_path / "run")
    assert same(weights(run), weights(again)) and difference(again) == ""


async def test_a_replay_begins_with_a_checkpoint_and_ends_after_a_step(
    model: str, tmp_path: Path
) -> None:
    checkpoints = {"ckpt_interval": 2, "ckpt_path": str(tmp_path / "checkpoints"), "ckpt_keep": 0}
    cfg = settings(model, **checkpoints)
    run = await recorded(FULLY_ASYNC, deepcopy(cfg), tmp_path / "run")
    cfg.trainer.ckpt_interval, cfg.trainer.ckpt_path = 0, str(tmp_path / "again")
    cfg.trainer.resume_mode = str(tmp_path / "checkpoints" / "step_000002")
    end = await replayed(FULLY_ASYNC, deepcopy(cfg), tmp_path / "run")
    assert [row["step"] for row in read_rows(tmp_path / "run-replay" / "metrics.jsonl")] == [
        3,
        4,
        5,
    ]
    assert same(weights(run), weights(end)) and difference(end) == ""
    cfg.trainer.resume_mode = "none"
    before = await replayed(FULLY_ASYNC, deepcopy(cfg), tmp_path / "run", final_step=4)
    after = LocalRun(FULLY_ASYNC, cfg)
    await after.dispatch.load(tmp_path / "checkpoints" / "step_000004")
    assert before.trainer.global_step == 4 and same(weights(before), weights(after))


async def test_another_learning_rate_is_reported_as_the_first_difference(
    model: str, tmp_path: Path
) -> None:
    await recorded(FULLY_ASYNC, settings(model), tmp_path / "run")
    cfg = settings(model)
    cfg.trainer.policy.optimizer_config.lr = 3e-2
    run = await replayed(FULLY_ASYNC, cfg, tmp_path / "run")
    assert difference(run).startswith("differently from step 2 on: ")


async def test_a_step_of_a_plans_own_way_is_rejected(model: str, tmp_path: Path) -> None:
    class Twice(RayPPOTrainer):
        async def learn_from(self, groups: Any) -> None:
            for part in (groups[:2], groups[2:]):
                await super().learn_from(part)

    await recorded(Twice, settings(model, steps=1), tmp_path / "run")
    with pytest.raises(UserError, match=r"step 1 of .* was trained in a way of the plan's own"):
        await replayed(RayPPOTrainer, settings(model, steps=1), tmp_path / "run")


@pytest.mark.parametrize(
    "mode, own", [("none", False), ("/runs/one/checkpoints/step_000003", True)]
)
def test_a_replay_from_a_checkpoint_has_the_runs_own_length_and_prompts(
    mode: str, own: bool
) -> None:
    cfg = Config()
    cfg.trainer.resume_mode, cfg.trainer.max_training_steps = mode, 10
    cfg.environment.domains = {"sums": {"proportion": 0.5}}
    ReplayExperiment(cfg)
    assert (cfg.trainer.epochs, cfg.trainer.max_training_steps) == ((0, 10) if own else (1, 0))
    assert bool(cfg.environment.domains) == own


def test_a_replay_that_would_end_before_it_begins_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {plan: sync}")
    with pytest.raises(
        UserError, match=r"--step 3: a replay from the checkpoint of step 5 begins with step 6"
    ):
        replay([str(tmp_path), "--from", "5", "--step", "3"])
