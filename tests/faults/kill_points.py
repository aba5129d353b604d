"""Runs whose controller and program are killed at many points in turn, by code inside of the controller.

Invariant: a point is recorded before the kill, so that the restarted process takes the next one. The run is otherwise
unchanged, except that some saves wait before the kill until all requests in flight have finished.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from skyasync import BasePPOExp, TrainerCallback
from skyasync.config.schema import Config
from skyasync.inference.client import InferenceClient
from skyasync.observability.jsonl import append_rows, read_rows
from skyasync.trainer.checkpoint.checkpoints import Unfinished
from skyasync.trainer.extensions.prompt_ledger import PromptLedger
from skyasync.workers.dispatch import RayWorkerDispatch

DONE = "kills.jsonl"  # in the run's folder
CONTROLLER, DRIVER = "controller", "driver"
STARTING, REMOVING, RENAMED = "starting", "removing", "behind the rename"
SAVING, RENAMING = "saving", "before the rename"
MOMENTS = (
    STARTING,
    "rollout",
    "sync",
    "training",
    SAVING,
    "written",
    RENAMING,
    RENAMED,
    REMOVING,
    "between",
)
FULL = (SAVING, RENAMED)  # an asynchronous plan has finished all groups that may be in flight


class Point(NamedTuple):
    """``after``: completed steps of the controller's process. ``wait_s``: from the beginning of the moment."""

    whom: str
    moment: str
    after: int
    wait_s: float


def draw_points(seed: str) -> list[Point]:
    """Every moment for both processes, in random order. The first is after two checkpoints, so that the run resumes."""
    chance = random.Random(seed)
    found = [
        Point(
            whom,
            moment,
            0 if moment == STARTING else chance.choice((0, 1)),
            chance.uniform(0.0, 0.03),
        )
        for whom in (CONTROLLER, DRIVER)
        for moment in MOMENTS
    ]
    chance.shuffle(found)
    first = next(point for point in found if point.moment != STARTING)
    found.remove(first)
    return [first._replace(after=2), *found]


class KillsAtPoints(TrainerCallback):
    """Kills in a controller's process.

    Args:
        driver: the program's process.
    """

    def __init__(self, points: list[Point], folder: Path, driver: int) -> None:
        done = len(read_rows(folder / DONE))
        self._next = points[done] if done < len(points) else None
        self._number, self._file, self._driver, self._steps = done, folder / DONE, driver, 0
        self._finished = 0  # finished groups that wait for training, when the last checkpoint before a kill was saved

    def is_due(self, *moments: str) -> bool:
        point = self._next
        return point is not None and point.moment in moments and self._steps >= point.after

    def at(self, moment: str, *, within: bool = False) -> None:
        """``within``: the moment has a duration."""
        point = self._next
        if point is None or not self.is_due(moment):
            return
        self._next = None
        if within:
            asyncio.get_running_loop().call_later(point.wait_s, self._kill, point)
        else:
            self._kill(point)

    def _kill(self, point: Point) -> None:
        append_rows(
            self._file, [{"step": self._number, **point._asdict(), "finished": self._finished}]
        )
        os.kill(os.getpid() if point.whom == CONTROLLER else self._driver, signal.SIGKILL)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._steps += 1
        self.at("between")

    def watch(self) -> None:
        """Change the classes of this process's parts so that they report their moments."""
        for owner, name, moment in (
            (InferenceClient, "generate_group", "rollout"),
            (InferenceClient, "update_weights", "sync"),
            (RayWorkerDispatch, "forward_backward", "training"),
            (RayWorkerDispatch, "save", SAVING),
        ):
            setattr(owner, name, self._reporting(getattr(owner, name), moment))
        finish, save, replace = Unfinished.finish, PromptLedger.save, os.replace

        def finishing(unfinished: Unfinished, *args: Any) -> Path:
            self.at("written")
            return finish(unfinished, *args)

        async def saving(prompts: PromptLedger, folder: Path) -> None:
            while (  # noqa: ASYNC110
                self.is_due(*FULL)
                and prompts.ledger.versions.keys() > prompts.ledger.finished.keys()
            ):
                await asyncio.sleep(0.01)
            self._finished = len(prompts.ledger.finished)
            await save(prompts, folder)

        def replacing(source: Any, target: Any, **options: Any) -> None:
            new = str(source).endswith(".unfinished")
            if new:
                self.at(RENAMING)
            replace(source, target, **options)
            if new:
                self.at(RENAMED)
            elif str(target).endswith(".discarded"):
                self.at(REMOVING)

        Unfinished.finish, PromptLedger.save, os.replace = finishing, saving, replacing  # type: ignore[method-assign,assignment]

    def _reporting(self, call: Callable[..., Any], moment: str) -> Callable[..., Any]:
        def reported(*args: Any, **options: Any) -> Any:
            self.at(moment, within=True)
            return call(*args, **options)

        return reported


class KillsExperiment(BasePPOExp):
    def __init__(self, cfg: Config, points: list[tuple[str, str, int, float]]) -> None:
        super().__init__(cfg)
        self.points, self.driver = [Point(*point) for point in points], os.getpid()
        self.kills: KillsAtPoints | None = None

    def build(self) -> Any:
        assert self.run_dir is not None
        self.kills = KillsAtPoints(self.points, self.run_dir.path, self.driver)
        self.kills.watch()
        return super().build()

    def get_callbacks(self) -> list[TrainerCallback]:
        assert self.kills is not None
        return [self.kills]

    async def start(self, trainer: Any) -> None:
        assert self.kills is not None
        self.kills.at(STARTING, within=True)
        await super().start(trainer)
