"""Every kind of failure at chosen moments, in simulated runs of all plans, with the real parts of the plans.

A killed program or controller leaves the disk as it is at that moment: the test copies the run's folder while the run
writes to it, and the same command resumes with the copy.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyasync.config.schema import Config
from skyasync.rollout.types import Prompt, PromptId
from skyasync.simulate.clock import run_virtual
from skyasync.trainer.plans import PLANS
from tests.chaos import simulation
from tests.chaos.events import FOREVER, Event
from tests.chaos.simulated_command import Command, Virtual
from tests.chaos.simulated_processes import Engine
from tests.chaos.simulated_ranks import Ranks
from tests.chaos.simulation import NAMES, Play

pytestmark = pytest.mark.fault

ROWS, POINTS, SEED = 8, 10, 7
MOMENTS = ("rollout", "sync", "training", "saving")
KINDS = (
    "kill-engine",
    "freeze-engine",
    "kill-rank",
    "freeze-rank",
    "kill-environment",
    "freeze-environment",
)


_settings_of = simulation.settings_of


def settings(seed: int, plan: str) -> tuple[Config, int]:
    """Every step is saved, with the requests in flight."""
    cfg, _ = _settings_of(SEED, plan)
    trainer, generator = cfg.trainer, cfg.generator
    trainer.train_batch_size, trainer.epochs, trainer.ckpt_interval, trainer.ckpt_keep = 2, 2, 1, 2
    trainer.ckpt_rollouts, trainer.ckpt_async, trainer.max_staleness, trainer.sync_interval = (
        True,
        False,
        2,
        1,
    )
    trainer.async_queue_size, trainer.partial_rollout = 1, "keep"
    (
        generator.n_samples_per_prompt,
        generator.num_inference_engines,
        generator.max_concurrent_rollouts,
    ) = 2, 2, 0
    return cfg, ROWS


def now() -> float:
    return asyncio.get_running_loop().time()


class MomentTimes:
    """The time of each moment in a run without faults."""

    def __init__(self) -> None:
        self.at: dict[str, list[float]] = {moment: [] for moment in MOMENTS}

    def recording(
        self, moment: str, call: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        async def recorded(*args: Any) -> Any:
            self.at[moment].append(now() + 0.2)  # in the middle of the moment
            return await call(*args)

        return recorded


@pytest.fixture(scope="module", autouse=True)
def same_settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched, simulation._quiet():
        patched.setattr(simulation, "settings_of", settings)
        yield


@pytest.fixture(scope="module")
def seen(same_settings: None) -> dict[str, MomentTimes]:
    return {plan: observed_moments(plan) for plan in NAMES}


def observed_moments(plan: str) -> MomentTimes:
    found = MomentTimes()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Engine, "update_weights", found.recording("sync", Engine.update_weights))
        patched.setattr(Ranks, "train", found.recording("training", Ranks.train))
        patched.setattr(Ranks, "save", found.recording("saving", Ranks.save))
        assert played(plan, []).wrong == []
    found.at["rollout"] = [at + 1.5 for at in found.at["sync"][2:-2]]
    return found


def played(plan: str, events: list[Event]) -> Play:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulation, "schedule", lambda *_: events)
        return simulation.play(SEED, plan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", NAMES)
def test_each_process_may_fail_or_hang_at_each_moment(
    plan: str, kind: str, seen: dict[str, MomentTimes]
) -> None:
    chance = random.Random(f"{plan} {kind}")
    for moment in MOMENTS:
        at = chance.choice(seen[plan].at[moment])
        lasts = FOREVER if kind.startswith("freeze") else 0.0
        found = played(plan, [Event(1, at, kind, lasts, chance.random())])
        assert (found.wrong, found.events[kind]) == ([], 1), f"{kind} in {moment}, at {at:g} s"


@pytest.mark.parametrize("plan", NAMES)
def test_a_command_resumes_from_the_folder_of_one_that_was_killed_at_any_moment(
    plan: str, tmp_path: Path
) -> None:
    copies = copied_while_it_runs(plan, tmp_path)
    saving = [copy for copy in copies if any(copy.glob("run/checkpoints/*.unfinished/*"))]
    assert saving, "some copies are from the middle of a save"
    chance = random.Random(plan)
    for copy in {*chance.sample(copies, POINTS), *chance.sample(saving, min(3, len(saving)))}:
        run_virtual(command(plan, copy).run())
        assert simulation._audited(Play(plan, SEED), copy / "run") == [], copy.name
    assert len(copies) > 2 * POINTS


def command(plan: str, folder: Path) -> Command:
    cfg, rows = settings(SEED, plan)
    said = [[{"role": "user", "content": chr(97 + row)}] for row in range(rows)]
    prompts = [Prompt(PromptId(0, row), words, simulation._env()) for row, words in enumerate(said)]
    return Command(
        cfg, type("Virtual", (Virtual, PLANS.find(plan)), {}), prompts, folder, seed=SEED
    )


def copied_while_it_runs(plan: str, folder: Path) -> list[Path]:
    """Copies of the run's folder every 1.3 seconds, and before and after every rename in it."""
    whole, copies = folder / "whole", list[Path]()

    def copy() -> None:
        copies.append(folder / f"copy-{len(copies)}")
        shutil.copytree(whole, copies[-1])

    async def scenario() -> None:
        async def watch() -> None:
            while True:
                await asyncio.sleep(1.3)
                copy()

        watching = asyncio.create_task(watch())
        assert await command(plan, whole).run()
        watching.cancel()

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in ((os, "replace"), (os, "rename"), (Path, "rename"), (Path, "replace")):
            patched.setattr(owner, name, around(getattr(owner, name), copy, whole))
        whole.mkdir()
        run_virtual(scenario())
    return copies


def around(change: Callable[..., Any], copy: Callable[[], None], whole: Path) -> Callable[..., Any]:
    """A program is killed before or after each rename."""
    inside: list[int] = []

    def changing(path: Any, *args: Any, **options: Any) -> Any:
        if inside or not str(path).startswith(f"{whole}{os.sep}"):
            return change(path, *args, **options)
        inside.append(1)
        try:
            copy()
            result = change(path, *args, **options)
            copy()
        finally:
            inside.pop()
        return result

    return changing
