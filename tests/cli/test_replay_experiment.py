"""Runs that are replayed by their schedule: real policy, real engine; see ``tests.trainer.plans.replayed``."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from skyasync.cli.replay import replay
from skyasync.cli.replay_experiment import ReenactmentExperiment, ReplayExperiment
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.rollout.schedule import ScheduledStep
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans import PLANS
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun
from tests.trainer.plans.replayed import EngineFails, both, recorded, replayed, same, settings, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


def steps_of(folder: Path) -> list[ScheduledStep]:
    return [ScheduledStep.parse(row) for row in read_rows(folder / "schedule.jsonl")]


def difference(run: LocalRun) -> str:
    return run.trainer.difference  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    "partial, client",
    [
        pytest.param("keep", None, marks=pytest.mark.matrix),
        ("keep", EngineFails),
        pytest.param("recompute", None, marks=pytest.mark.matrix),
    ],
    ids=["keep", "failure", "recompute"],
)
async def test_weights_that_change_in_the_middle_of_responses_are_replayed(
    partial: str, client: Any, model: str, tmp_path: Path
) -> None:
    parts = {} if client is None else {"client": client}
    for attempt in range(5):  # until a response was in flight during a weight sync, which depends on the machine
        folder = tmp_path / str(attempt)
        run, again = await both("fully_async", settings(model, partial_rollout=partial), folder / "run", **parts)
        turns = [
            t for step in steps_of(folder / "run") for g in step.groups for turns in g.samples or () for t in turns
        ]
        if any(len(turn) > 1 for turn in turns):
            break
    else:
        pytest.fail("no response was in flight during a weight sync")
    assert any(change.cut for turn in turns for change in turn) == (partial == "recompute" or client is not None)
    assert same(weights(run), weights(again))
    assert difference(again) == ""
    rows = read_rows(folder / "run-replay" / "metrics.jsonl")
    assert [(row["step"], row["replay/same"]) for row in rows] == [(step, 1.0) for step in range(1, 6)]


class InTwoParts(StreamedRayPPOTrainer):
    """The last two groups of a batch arrive late, in another order."""

    async def roll_out(self, prompts: Any, step: int | None = None) -> Any:
        rolled_out = await super().roll_out(prompts, step)
        place = self._place = getattr(self, "_place", 0) + 1
        while place % 4 in (0, 3) and len(self._arrivals.accepted) < (2 if place % 4 == 0 else 3):
            await self._arrived.wait()
            await asyncio.sleep(0)
        return rolled_out


async def test_a_plan_that_trains_in_parts_has_the_same_parts(model: str, tmp_path: Path) -> None:
    run = await recorded(InTwoParts, settings(model, steps=3), tmp_path / "run")
    assert all(len(step.parts) > 1 for step in steps_of(tmp_path / "run"))
    again = await replayed(StreamedRayPPOTrainer, settings(model, steps=3), tmp_path / "run")
    assert same(weights(run), weights(again)) and difference(again) == ""


async def test_a_replay_begins_with_a_checkpoint_and_ends_after_a_step(model: str, tmp_path: Path) -> None:
    checkpoints = {"ckpt_interval": 2, "ckpt_path": str(tmp_path / "checkpoints"), "ckpt_keep": 0}
    cfg = settings(model, **checkpoints)
    run = await recorded(PLANS.find("fully_async"), deepcopy(cfg), tmp_path / "run")
    assert any(step.whole for step in steps_of(tmp_path / "run")), "some tokens are older than a checkpoint"
    cfg.trainer.ckpt_interval, cfg.trainer.ckpt_path = 0, str(tmp_path / "again")
    cfg.trainer.resume_mode = str(tmp_path / "checkpoints" / "step_000002")
    end = await replayed(PLANS.find("fully_async"), deepcopy(cfg), tmp_path / "run")
    assert [row["step"] for row in read_rows(tmp_path / "run-replay" / "metrics.jsonl")] == [3, 4, 5]
    assert same(weights(run), weights(end)) and difference(end) == ""
    cfg.trainer.resume_mode = "none"
    before = await replayed(PLANS.find("fully_async"), deepcopy(cfg), tmp_path / "run", last=4)
    after = LocalRun(PLANS.find("fully_async"), cfg)
    await after.dispatch.load(tmp_path / "checkpoints" / "step_000004")
    assert before.trainer.global_step == 4 and same(weights(before), weights(after))


@pytest.mark.matrix
async def test_another_loss_is_the_same_twice_and_the_first_difference_is_reported(model: str, tmp_path: Path) -> None:
    await recorded(PLANS.find("fully_async"), settings(model), tmp_path / "run")
    ends = []
    for _ in range(2):
        cfg = settings(model)
        cfg.trainer.policy.optimizer_config.lr = 3e-2
        run = await replayed(PLANS.find("fully_async"), cfg, tmp_path / "run")
        ends.append(weights(run))
        assert difference(run).startswith("differently from step 2 on: ")
    assert same(*ends)


async def test_a_run_that_went_on_from_a_checkpoint_is_replayed_from_its_beginning(model: str, tmp_path: Path) -> None:
    folder = {"ckpt_interval": 1, "ckpt_path": str(tmp_path / "checkpoints")}
    plan = PLANS.find("fully_async")

    class Breaks(plan):  # type: ignore[valid-type, misc]
        async def train_on(self, rollout: Any) -> Any:
            if self.global_step == 3:
                raise RuntimeError("broken")
            return await super().train_on(rollout)

    with pytest.raises(RuntimeError, match="broken"):
        await recorded(Breaks, settings(model, **folder), tmp_path / "run")
    run = await recorded(plan, settings(model, resume_mode="latest", **folder), tmp_path / "run", resume=True)
    assert [step.step for step in steps_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
    again = await replayed(plan, settings(model), tmp_path / "run")
    assert same(weights(run), weights(again)) and difference(again) == ""


async def test_a_step_of_a_plans_own_way_is_refused(model: str, tmp_path: Path) -> None:
    class Twice(RayPPOTrainer):
        async def learn_from(self, groups: Any) -> None:
            for part in (groups[:2], groups[2:]):
                await super().learn_from(part)

    await recorded(Twice, settings(model, steps=1), tmp_path / "run")
    with pytest.raises(UserError, match=r"step 1 of .* was trained in a way of the plan's own"):
        await replayed(RayPPOTrainer, settings(model, steps=1), tmp_path / "run")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("backend", "vllm", "generator.backend=vllm, whose samples are not bitwise the same twice"),
        ("oversample_per_prompt", 2, "generator.oversample_per_prompt, so its samples depend on more"),
        ("agent_program", "agent.py:play", "generator.agent_program, so its samples depend on more"),
    ],
)
def test_what_cannot_be_generated_again_is_refused(key: str, value: Any, message: str, model: str) -> None:
    cfg = settings(model)
    setattr(cfg.generator, key, value)
    with pytest.raises(UserError, match=message):
        ReenactmentExperiment(cfg)


def test_a_replay_on_a_loaded_machine_gives_no_engine_up_that_answers_within_a_minute(model: str) -> None:
    cfg = settings(model)
    cfg.generator.heartbeat_timeout_s = 4.0
    ReenactmentExperiment(cfg)
    assert cfg.generator.heartbeat_timeout_s == 60.0


@pytest.mark.parametrize("mode, own", [("none", False), ("/runs/one/checkpoints/step_000003", True)])
def test_a_replay_from_a_checkpoint_has_the_runs_own_length_and_prompts(mode: str, own: bool) -> None:
    cfg = Config()
    cfg.trainer.resume_mode, cfg.trainer.max_training_steps = mode, 10
    cfg.environment.domains = {"sums": {"proportion": 0.5}}
    ReplayExperiment(cfg)
    assert (cfg.trainer.epochs, cfg.trainer.max_training_steps) == ((0, 10) if own else (1, 0))
    assert bool(cfg.environment.domains) == own


def test_a_replay_that_would_end_before_it_begins_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {plan: sync}")
    with pytest.raises(UserError, match=r"--step 3: a replay from the checkpoint of step 5 begins with step 6"):
        replay([str(tmp_path), "--from", "5", "--step", "3"])
