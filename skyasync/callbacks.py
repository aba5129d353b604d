"""The interface of code that accompanies a run without being part of its plan; see
``skyasync.trainer.extensions``."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Answer = Awaitable[None] | None


class Watched(Protocol):
    """What an extension may use of the trainer, which is the ``RayPPOTrainer`` itself."""

    @property
    def global_step(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def last_metrics(self) -> dict[str, float]: ...
    @property
    def eval_dataset(self) -> Sequence[Any]: ...
    def stop(self, reason: str) -> None: ...


class RunExtension:
    """Override what you need, with ``def`` or ``async def``; ``trainer`` is the running
    ``RayPPOTrainer``.

    The run waits for each method, at most ``trainer.step_timeout_s`` if it is asynchronous. An
    exception ends the run. ``trainer.stop(reason)`` ends it well, after the step.
    """

    def on_start(self, trainer: Watched) -> Answer:
        """Parts are up, a checkpoint is loaded, weights are synced; nothing has been generated."""

    def on_step_begin(self, trainer: Watched, step: int) -> Answer:
        """A step begins; the first is 1. With asynchronous plans its rollouts may have begun
        before."""

    def on_rollout(self, trainer: Watched, groups: Sequence[Any]) -> Answer:
        """After each rollout, with each ``skyasync.rollout.types.Group`` as it was generated; do
        not change them."""

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> Answer:
        """After each step, with everything that is about to be logged; may add metrics."""

    def on_weight_update(self, trainer: Watched, version: int) -> Answer:
        """After each weight sync: all engines compute with the weights of this version."""

    def on_evaluate(self, trainer: Watched, metrics: dict[str, float]) -> Answer:
        """After each evaluation."""

    def on_checkpoint(self, trainer: Watched, folder: Path) -> Answer:
        """After a checkpoint is complete."""

    def on_failure(self, trainer: Watched, error: BaseException) -> Answer:
        """After the run has failed. An error in here is added to the first one as a note."""

    def on_end(self, trainer: Watched) -> Answer:
        """After the last step, if nothing failed."""

    def state_dict(self) -> Mapping[str, Any]:
        """What checkpoints keep of it: numbers, strings, booleans, None, and lists and mappings of
        them.

        Keys of mappings are text when they are loaded.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave to the checkpoint that the run resumes from, before
        ``on_start``."""


class TrainerCallback(RunExtension):
    """A ``RunExtension`` of the user's."""
