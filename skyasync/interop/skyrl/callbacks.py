"""SkyRL's callbacks: three arguments for every event, and flags that ask for a save or an evaluation.

Invariant: an event is over when every callback has returned, also one that is ``async def``; an exception ends the run.
Source: ``skyrl/train/utils/callbacks.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.callbacks import RunExtension, Watched
from skyasync.envs.registry import Foreign
from skyasync.errors import UserError, unknown

if TYPE_CHECKING:
    from skyasync.interop.skyrl.trainer import RayPPOTrainer

EVENTS = ("on_train_start", "on_train_end", "on_epoch_start", "on_epoch_end", "on_step_start", "on_step_end",
          "on_eval_start", "on_eval_end", "on_save", "on_log")  # fmt: skip


@dataclass
class CallbackInput:
    """What an event is about; fields that have no part in it are None."""

    global_step: int
    epoch: int
    total_steps: int
    steps_per_epoch: int
    batch: Foreign = None
    metrics: dict[str, Any] | None = None
    logs: dict[str, Any] | None = None
    ckpt_path: str | None = None


@dataclass
class TrainingControl:
    """Set in ``on_step_end``: the step then ends with what is asked for."""

    should_save: bool = False
    should_evaluate: bool = False

    def reset(self) -> None:
        self.should_save = self.should_evaluate = False


class TrainingCallback:
    """Override the events that you care about, ``def`` or ``async def``."""


for _event in EVENTS:
    setattr(TrainingCallback, _event, lambda self, trainer, callback_input, control: None)


class CallbackHandler(RunExtension):
    """Tells SkyRL's callbacks of what happens to our trainer."""

    def __init__(self, callbacks: Sequence[TrainingCallback]) -> None:
        self.callbacks, self.control = list(callbacks), TrainingControl()
        self._owed: list[tuple[Awaitable[object], CallbackInput]] = []
        self._saw_step = False
        for callback in callbacks:
            check_events(callback)

    # what our trainer tells

    def on_start(self, trainer: Watched) -> None:
        self.control.reset()
        self.fire("on_train_start", trainer)
        self._begin_step(trainer)

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        event_input = self.fire("on_step_end", trainer, metrics=metrics)
        if trainer.global_step % event_input.steps_per_epoch == 0:
            self.fire("on_epoch_end", trainer)

    def on_evaluate(self, trainer: Watched, metrics: dict[str, float]) -> None:
        self.fire("on_eval_end", trainer, metrics=metrics)

    def on_checkpoint(self, trainer: Watched, folder: Path) -> None:
        self.fire("on_save", trainer, ckpt_path=str(folder))

    def on_end(self, trainer: Watched) -> None:
        self.fire("on_train_end", trainer)

    # what the compatible trainer adds

    def fire(self, event: str, trainer: Foreign, **more: Foreign) -> CallbackInput:
        """One event for all callbacks; what ``async def`` ones return is awaited by ``settle``."""
        event_input = self._input(trainer, event, more)
        for callback in self.callbacks:
            answer = getattr(callback, event)(trainer, event_input, self.control)
            if inspect.isawaitable(answer):
                self._owed.append((answer, event_input))
        return event_input

    def next_step(self, trainer: RayPPOTrainer) -> None:
        """A step has been logged, and another follows."""
        if trainer.context.progress.step < trainer.total_steps:
            self._begin_step(trainer)

    async def settle(self) -> list[CallbackInput]:
        """Await what is owed; the events that it was about."""
        done = []
        while self._owed:
            awaitable, event_input = self._owed.pop(0)
            await awaitable
            done.append(event_input)
        return done

    def _begin_step(self, trainer: Foreign) -> None:
        if trainer.context.progress.step % trainer.steps_per_epoch == 0:
            self.fire("on_epoch_start", trainer)
        self.fire("on_step_start", trainer)

    @staticmethod
    def _input(trainer: RayPPOTrainer, event: str, more: Mapping[str, Foreign]) -> CallbackInput:
        step, per_epoch = trainer.context.progress.step, trainer.steps_per_epoch
        in_hand = step + (event in ("on_step_start", "on_epoch_start"))
        return CallbackInput(in_hand, max(in_hand - 1, 0) // per_epoch, trainer.total_steps, per_epoch, **more)


def check_events(callback: object) -> None:
    """Raises ``UserError`` for a method ``on_...`` that is no event, or an event that is missing."""
    for name in dir(callback):
        if name.startswith("on_") and name not in EVENTS:
            raise UserError(f"callback {type(callback).__name__}: {unknown('event', name, EVENTS)}")
    for name in EVENTS:
        if not hasattr(callback, name):
            raise UserError(f"callback {type(callback).__name__} has no {name}: subclass TrainingCallback")
