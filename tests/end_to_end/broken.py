"""Parts that fail in their second batch, each in its own process, and record the time."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import ray

from skyasync import BasePPOExp, BaseTextEnvStepOutput, TrainerCallback
from skyasync.algorithms.losses.clipped import importance_sampling
from skyasync.rollout.generator import EpisodeGenerator
from tests.end_to_end.parts import Sevens

KILLED_AT = "killed_at"


class PartIsBrokenError(Exception):
    """``at``: the machine's monotonic clock, which all its processes share."""

    def __init__(self, part: str, at: float | None = None) -> None:
        super().__init__(part, time.monotonic() if at is None else at)


def seconds_since_failure(error: BaseException, run: Path) -> float:
    killed = run / KILLED_AT
    said = re.search(r"PartIsBrokenError: \('[\w ]+', ([\d.]+)\)", str(error))
    return time.monotonic() - float(killed.read_text() if killed.exists() else said[1])


class BrokenGenerator(EpisodeGenerator):
    batches = 0

    async def generate(self, input_batch: Any) -> Any:
        self.batches += 1
        if self.batches == 2:
            raise PartIsBrokenError("generator")
        return await super().generate(input_batch)


class BrokenEnvironment(Sevens):
    episodes = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        BrokenEnvironment.episodes += 1
        if BrokenEnvironment.episodes > 40:  # a batch has 32
            raise PartIsBrokenError("environment")
        return super().step(action)


def broken_loss(current: Any, proximal: Any, behaviour: Any, advantages: Any) -> Any:
    broken_loss.calls += 1
    if broken_loss.calls > 1:
        raise PartIsBrokenError("policy worker")
    return importance_sampling(current, behaviour, advantages)


broken_loss.calls = 0


class KillTheEngine(TrainerCallback):
    """SIGKILL to the engine's process, as by the kernel when memory is short."""

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        actors = ray._private.state.actors().values()
        engines = [
            a["Pid"]
            for a in actors
            if a["ActorClassName"] == "_EngineActor" and a["State"] == "ALIVE"
        ]
        (trainer.run_dir.path / KILLED_AT).write_text(str(time.monotonic()))
        for process in engines:
            os.kill(process, signal.SIGKILL)
        assert engines


class GeneratorBreaks(BasePPOExp):
    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        generator = super().get_generator(cfg, tokenizer, inference_engine_client)
        generator.__class__ = BrokenGenerator
        return generator


class EngineIsKilled(BasePPOExp):
    def get_callbacks(self) -> list[TrainerCallback]:
        return [KillTheEngine()]
