"""A run whose engine list file changes while it generates."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import ray

from skyasync import BasePPOExp, TrainerCallback
from skyasync.config.schema import Config
from skyasync.inference.client import InferenceClient
from skyasync.inference.elastic import FILE, write_engine_list
from tests.run.test_ray_cluster import listening

SEEN = "engines.jsonl"  # in the run's folder: the number of engines after each step

Changes = dict[int, list[str]]  # after this step: the new engine list


class Client(InferenceClient):
    """After a change of the list, a request waits until the number of engines is the new one."""

    expected_engines = 1
    received = 0

    async def generate_group(self, requests: Any, partial: Any = None) -> Any:
        before, self.received = self.received, self.received + len(requests)
        if before // 8 < self.received // 8:  # other requests are on their way to the engines
            while len(self.pool.healthy) != self.expected_engines:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        async with aclosing(super().generate_group(requests, partial)) as arriving:
            async for outputs in arriving:
                yield outputs


class ChangesEngineList(TrainerCallback):
    def __init__(self, changes: Changes) -> None:
        self.changes = changes

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        client, folder = trainer.inference_engine_client, trainer.run_dir.path
        actors = ray._private.state.actors().values()
        running = [
            a["Pid"]
            for a in actors
            if a["ActorClassName"] == "_EngineActor" and a["State"] == "ALIVE"
        ]
        every = {
            a["Pid"] for a in actors if a["State"] == "ALIVE"
        }  # engines, models, environments, the controller
        listeners = listening(every) if trainer.global_step == 5 else []
        row: dict[str, Any] = {
            "step": trainer.global_step,
            "healthy": len(client.pool.healthy),
            "processes": len(running),
        }
        row["beyond_loopback"] = [
            address for address in listeners if not address.endswith("0100007F")
        ]
        row["listening"] = len(listeners)
        with (folder / SEEN).open("a") as file:
            file.write(json.dumps(row) + "\n")
        if names := self.changes.get(trainer.global_step):
            write_engine_list(folder / FILE, names)
            client.expected_engines = len(names)


class ChangingEngines(BasePPOExp):
    def __init__(self, cfg: Config, changes: Changes) -> None:
        super().__init__(cfg)
        self.changes = changes

    def get_inference_client(self) -> InferenceClient:
        client = super().get_inference_client()
        client.__class__ = Client
        return client

    def get_callbacks(self) -> list[TrainerCallback]:
        return [ChangesEngineList(self.changes)]
