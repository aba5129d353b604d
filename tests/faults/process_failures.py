"""Runs in which one process is killed from outside, at chosen moments."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from skyasync import BasePPOExp, TrainerCallback
from skyasync.config.schema import Config
from skyasync.inference.client import InferenceClient
from skyasync.workers.dispatch import RayWorkerDispatch

SEEN = "processes.jsonl"  # in the run's folder: the engines of each step

# After this step, once: an actor's class, after "stop" if it hangs instead, before "in training" or "in sync" if the
# moment is in the middle of the next step.
Kills = dict[int, str]
MIDDLE_S = 0.005


def running_processes(name: str) -> list[int]:
    """Processes of the running actors of this class."""
    actors = ray._private.state.actors().values()
    return [a["Pid"] for a in actors if a["ActorClassName"] == name and a["State"] == "ALIVE"]


class Kill(TrainerCallback):
    """Records a kill before it, so that the restarted run does not repeat it."""

    def __init__(self, kills: Kills) -> None:
        self.kills = kills
        self.due = ("", "")  # the moment, and the kill

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        folder: Path = trainer.run_dir.path
        with (folder / SEEN).open("a") as file:
            file.write(
                json.dumps(
                    {"step": trainer.global_step, "engines": running_processes("_EngineActor")}
                )
                + "\n"
            )
        name = self.kills.get(trainer.global_step, "")
        mark = folder / f"killed-{name}-{trainer.global_step}"
        if name and not mark.exists():
            mark.touch()
            what, _, moment = name.partition(" in ")
            if moment:
                self.due = (moment, what)
            else:
                signal_process(what)

    def watch(self) -> None:
        """Change the classes of this process's parts so that they report their moments."""
        for owner, name, moment in (
            (RayWorkerDispatch, "forward_backward", "training"),
            (InferenceClient, "update_weights", "sync"),
        ):
            setattr(owner, name, self._reporting(getattr(owner, name), moment))

    def _reporting(self, call: Callable[..., Any], moment: str) -> Callable[..., Any]:
        async def reported(*args: Any, **options: Any) -> Any:
            if self.due[0] == moment:
                asyncio.get_running_loop().call_later(MIDDLE_S, signal_process, self.due[1])
                self.due = ("", "")
            return await call(*args, **options)

        return reported


def signal_process(what: str) -> None:
    how, _, of = what.rpartition(" ")
    os.kill(running_processes(of)[-1], signal.SIGSTOP if how == "stop" else signal.SIGKILL)


class KilledProcesses(BasePPOExp):
    def __init__(self, cfg: Config, kills: Kills) -> None:
        super().__init__(cfg)
        self.kills = Kill(kills)

    def build(self) -> Any:
        self.kills.watch()
        return super().build()

    def get_callbacks(self) -> list[TrainerCallback]:
        return [self.kills]
