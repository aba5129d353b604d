"""A run in one process, and its replay by the schedule that it recorded.

``python -m tests.trainer.plans.replayed 20``: 20 runs on a loaded machine; in half of them an engine fails.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoTokenizer

from skyasync.cli.replay_experiment import ReplayTrainer
from skyasync.config.schema import Config
from skyasync.envs.pool import local_pool
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.client import InferenceClient
from skyasync.inference.inflight import InflightRequest
from skyasync.inference.interface import EngineFailedError
from skyasync.inference.pool import LostWork
from skyasync.observability.run_dir import RunDirectory
from skyasync.observability.trackers import JsonlTracker, TrackerContext
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.reenactment import ScheduledClient
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans import PLANS
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import CHAT, LocalRun, config


async def recorded(
    plan: type[RayPPOTrainer], cfg: Config, folder: Path, *, resume: bool = False, **parts: Any
) -> LocalRun:
    """A run with a folder."""
    run = LocalRun(plan, cfg, **parts)
    _with_folder(run, folder, resume=resume)
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


def _with_folder(run: LocalRun, folder: Path, *, resume: bool = False) -> None:
    run_dir = RunDirectory(folder.parent, folder.name, resume=resume)
    run.trainer.context.run_dir = run_dir
    run.trainer.context.tracker = cast(Any, JsonlTracker(TrackerContext(run_dir, {})))


def weights(run: LocalRun) -> dict[str, torch.Tensor]:
    return run.dispatch.weights()  # type: ignore[no-any-return]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


class EngineFails(InferenceClient):
    """Two engines; the first one fails after ``after_s``, in the middle of a response, which the other continues."""

    after_s = 0.1

    def __init__(self, engines: Any, timeout_s: float) -> None:
        super().__init__([*engines, TransformersEngine(engines[0].config)], timeout_s)
        self.pool.on_failure = self._note
        self.continued = 0

    def _note(self, index: int, error: BaseException, lost: LostWork) -> None:
        self.continued = lost.requests

    async def start(self) -> None:
        await super().start()
        self._failing = asyncio.create_task(self._fail())

    async def _fail(self) -> None:
        await asyncio.sleep(self.after_s)
        while not any(self._is_in_its_middle(each) for each in self._inflight.at(0).values()):
            await self.poll(0)
            await asyncio.sleep(0.001)
        self.pool.fail(0, EngineFailedError("the engine has failed"))

    @staticmethod
    def _is_in_its_middle(inflight: InflightRequest) -> bool:
        return 0 < inflight.so_far.token_ids.size < inflight.request.sampling.max_tokens

    async def shutdown(self) -> None:
        self._failing.cancel()
        await super().shutdown()


def settings(model: str, steps: int = 5, **trainer: Any) -> Config:
    """Settings of a run whose requests are in flight while weights change."""
    cfg = config(model, steps=steps, eval_interval=0, allow_uncorrected=True, **{"max_staleness": 3} | trainer)
    cfg.generator.sampling_params.max_generate_length = 80  # the context ends them first
    return cfg


async def both(plan: str, cfg: Config, folder: Path, **parts: Any) -> tuple[LocalRun, LocalRun]:
    """A run and its replay."""
    again = deepcopy(cfg)
    run = await recorded(PLANS.find(plan), cfg, folder, **parts)
    return run, await replayed(PLANS.find(plan), again, folder)


def main(runs: int) -> None:
    """Runs of ``fully_async`` on a loaded machine; in half of them an engine fails."""
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    identical = 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = save_tiny_llama(Path(folder) / "model", tied=False)
            for number in range(runs):
                chance = random.Random(number)
                mode, staleness = chance.choice(["keep", "recompute", "wait"]), chance.randint(1, 4)
                cfg = settings(model, steps=8, partial_rollout=mode, max_staleness=staleness, seed=number)
                parts: dict[str, Any] = {}
                if number % 2:
                    parts["client"] = type("Fails", (EngineFails,), {"after_s": chance.uniform(0.1, 1.5)})
                run, again = asyncio.run(both("fully_async", cfg, Path(folder) / str(number), **parts))
                equal = same(weights(run), weights(again)) and not again.trainer.difference  # type: ignore[attr-defined]
                identical += equal
                continued = run.client.continued if isinstance(run.client, EngineFails) else 0
                print(
                    f"run {number}: {mode}, max_staleness={staleness}, {continued} requests continued: {equal}",
                    flush=True,
                )
    finally:
        for process in load:
            process.kill()
            process.wait()
    print(f"{identical} of {runs} replayed to identical weights")
    raise SystemExit(identical != runs)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
