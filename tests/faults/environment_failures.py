"""Runs whose environment processes kill or stop themselves in the middle of an episode, by order."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from skyasync import BasePPOExp, BaseTextEnvStepOutput, TrainerCallback
from skyasync.config.schema import Config
from tests.end_to_end.parts import Sevens

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

Orders = dict[
    int, list[str]
]  # after this step: one of SIGNALS for each process that takes an order


class FailsByOrder(Sevens):
    """An order is a file. One process alone can remove it, and each process takes one order at a time."""

    one = threading.Lock()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        with self.one:
            for order in sorted(Path(self.env_config["orders"]).iterdir()):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    order.unlink()
                    os.kill(os.getpid(), SIGNALS[order.suffix.removeprefix(".")])
                    time.sleep(600)  # until the signal arrives
        return super().step(action)


class GivesOrders(TrainerCallback):
    def __init__(self, orders: Orders, folder: Path) -> None:
        self._orders, self._folder = orders, folder

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        for number, how in enumerate(self._orders.get(trainer.global_step, ())):
            (self._folder / f"{number}.{how}").touch()


class OrderedFailures(BasePPOExp):
    def __init__(self, cfg: Config, orders: Orders) -> None:
        super().__init__(cfg)
        self.orders = orders

    def get_callbacks(self) -> list[TrainerCallback]:
        return [GivesOrders(self.orders, Path(self.cfg.environment.env_config["orders"]))]
