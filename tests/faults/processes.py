"""Runs of which a process is killed from outside, at chosen moments."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import ray

from skyasync import BasePPOExp, TrainerCallback
from skyasync.config.schema import Config

SEEN = "processes.jsonl"  # in the run's folder: which engines each step had

Kills = dict[int, str]  # behind this step, once: an actor's class, "stop" before it if it is to hang


def living(name: str) -> list[int]:
    """Processes of the living actors of this class."""
    actors = ray._private.state.actors().values()
    return [a["Pid"] for a in actors if a["ActorClassName"] == name and a["State"] == "ALIVE"]


class Kill(TrainerCallback):
    """What was killed is written down first, so that the run that goes on does not kill it again."""

    def __init__(self, kills: Kills) -> None:
        self.kills = kills

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        folder: Path = trainer.run_dir.path
        with (folder / SEEN).open("a") as file:
            file.write(json.dumps({"step": trainer.global_step, "engines": living("_EngineActor")}) + "\n")
        name = self.kills.get(trainer.global_step, "")
        mark = folder / f"killed-{name}-{trainer.global_step}"
        if name and not mark.exists():
            mark.touch()
            how, _, of = name.rpartition(" ")
            os.kill(living(of)[-1], signal.SIGSTOP if how == "stop" else signal.SIGKILL)


class Killed(BasePPOExp):
    def __init__(self, cfg: Config, kills: Kills) -> None:
        super().__init__(cfg)
        self.kills = kills

    def get_callbacks(self) -> list[TrainerCallback]:
        return [Kill(self.kills)]
