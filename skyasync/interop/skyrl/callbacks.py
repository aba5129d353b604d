"""SkyRL's callbacks: three arguments for every event, and flags that ask for a save or an evaluation.

Invariant: an event is over when every callback has returned, also one that is ``async def``; an exception ends the run.
Source: ``skyrl/train/utils/callbacks.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyasync.callbacks import RunExtension, Watched
from skyasync.envs.registry import Foreign
from skyasync.errors import UserError, unknown

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
    """Set in ``on_step_end``: the step then ends with a checkpoint or an evaluation."""

    should_save: bool = False
    should_evaluate: bool = False

    def reset(self) -> None:
        self.should_save = self.should_evaluate = False


class TrainingCallback:
    """Override the events that you care about, ``def`` or ``async def``."""


for _event in EVENTS:
    setattr(TrainingCallback, _event, lambda self, trainer, callback_input, control: None)


class CallbackHandler(RunExtension):
    """Passes the events of our trainer to SkyRL's callbacks."""

    def __init__(self, callbacks: Sequence[TrainingCallback]) -> None:
        self.callbacks, self.control = list(callbacks), TrainingControl()
        self._unawaited: list[tuple[Awaitable[object], CallbackInput]] = []
        for callback in callbacks:
            check_events(callback)

    # Events of our trainer.

    def on_start(self, trainer: Watched) -> None:
        self.control.reset()
        self.fire("on_train_start", trainer)
        self.begin_step(trainer)

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

    # Events that ``SkyRLNames`` adds.

    def begin_step(self, trainer: Foreign) -> None:
        """The events before a step, if another one follows."""
        step = trainer.context.progress.step
        if step < trainer.total_steps:
            if step % trainer.steps_per_epoch == 0:
                self.fire("on_epoch_start", trainer)
            self.fire("on_step_start", trainer)

    def fire(self, event: str, trainer: Foreign, **more: Foreign) -> CallbackInput:
        """One event for all callbacks; what ``async def`` ones return is awaited by ``settle``."""
        per_epoch = trainer.steps_per_epoch
        step = trainer.context.progress.step + (event in ("on_step_start", "on_epoch_start"))
        event_input = CallbackInput(step, max(step - 1, 0) // per_epoch, trainer.total_steps, per_epoch, **more)
        for callback in self.callbacks:
            answer = getattr(callback, event)(trainer, event_input, self.control)
            if inspect.isawaitable(answer):
                self._unawaited.append((answer, event_input))
        return event_input

    async def settle(self) -> list[CallbackInput]:
        """Await what ``async def`` callbacks have returned; the events that it was about."""
        done = []
        while self._unawaited:
            awaitable, event_input = self._unawaited.pop(0)
            await awaitable
            done.append(event_input)
        return done


def check_events(callback: object) -> None:
    """Raises ``UserError`` for a method ``on_...`` that is no event, or an event that is missing."""
    for name in dir(callback):
        if name.startswith("on_") and name not in EVENTS:
            raise UserError(f"callback {type(callback).__name__}: {unknown('event', name, EVENTS)}")
    for name in EVENTS:
        if not hasattr(callback, name):
            raise UserError(f"callback {type(callback).__name__} has no {name}: subclass TrainingCallback")
