"""Runs in which engine processes are killed or stopped from outside, one after the other, at chosen moments."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import ray

from skyasync import BasePPOExp, TrainerCallback
from skyasync.config.schema import Config
from skyasync.inference.backends.vllm.process_guard import VARIABLE
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.weight_sync.update import WeightUpdate

FOUND = "engines.json"  # in the run's folder: versions and unused failures at the run's end
ALONE = (
    64  # requests to the other engines before the run waits for the replacement engine: two steps
)

PlannedFailures = list[
    tuple[str, str]
]  # moment ("rollout", "sync", "idle") and failure: "kill", "stop" or "kill core"


def fail(how: str) -> None:
    """Kill or stop the engine that was started last."""
    actors = ray._private.state.actors().values()
    running = [a for a in actors if a["ActorClassName"] == "_EngineActor" and a["State"] == "ALIVE"]
    engine = max(running, key=lambda actor: actor["StartTime"])["Pid"]
    for process in guarded_by(engine) if how == "kill core" else [engine]:
        os.kill(process, signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def guarded_by(actor: int) -> list[int]:
    """The processes that vLLM has started for an engine's process."""
    mark, found = f"{VARIABLE}={actor}-".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            started = mark in (folder / "environ").read_bytes()
        except OSError:  # ended, or another user's
            continue
        found += [int(folder.name)] if started else []
    return found


def failed_engines(client: InferenceClient) -> bool:
    return len(client.pool.healthy) < len(client.engines)


class Client(InferenceClient):
    """Lets an engine fail at the next moment of the list, as soon as all engines are healthy."""

    planned: PlannedFailures = []  # noqa: RUF012  (set on the instance)
    since = 0  # requests since the last failure

    def reached(self, moment: str) -> None:
        if (
            self.planned
            and self.planned[0][0] == moment
            and not failed_engines(self)
            and self.since >= ALONE
        ):
            _, how = self.planned.pop(0)
            self.since = 0
            fail(how)

    async def generate_group(self, requests: Any, partial: Any = None) -> Any:
        for _ in requests:
            self.since += 1
            if self.since % 8 == 0:
                asyncio.get_running_loop().call_later(0.02, self.reached, "rollout")
        while failed_engines(self) and self.since > ALONE:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        async with aclosing(super().generate_group(requests, partial)) as arriving:
            async for outputs in arriving:
                yield outputs

    async def update_weights(self, update: WeightUpdate) -> None:
        self.reached("sync")
        await super().update_weights(update)


class Idle(TrainerCallback):
    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        trainer.inference_engine_client.reached("idle")


class FailingEngines(BasePPOExp):
    """Args: planned: in this order."""

    def __init__(self, cfg: Config, planned: PlannedFailures) -> None:
        super().__init__(cfg)
        self.planned = planned

    def get_inference_client(self) -> InferenceClient:
        client = super().get_inference_client()
        client.__class__ = Client
        client.planned = list(self.planned)  # type: ignore[attr-defined]
        return client

    def get_callbacks(self) -> list[TrainerCallback]:
        return [Idle()]

    async def close(self) -> None:
        """When all engines are healthy, request a token of each, which has the version of the engine's weights."""
        async with asyncio.timeout(60):
            while failed_engines(self.components.client):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        last = GenerationRequest("last", [1, 2], SamplingParams(max_tokens=1))
        versions = []
        for engine in self.components.client.engines:
            async for (output,) in engine.generate([last]):
                versions += output.versions.tolist()
        assert self.run_dir is not None
        found = {"versions": versions, "unused": self.components.client.planned}
        (self.run_dir.path / FOUND).write_text(json.dumps(found))
        await super().close()
