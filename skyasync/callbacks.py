"""The interface of extensions, which accompany a run without being part of its plan.

The library's own are in ``skyasync.trainer.extensions``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Answer = Awaitable[None] | None
Metrics = dict[str, float]  # by name


class Watched(Protocol):
    """The attributes of the ``RayPPOTrainer`` that an extension may use."""

    @property
    def global_step(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def last_metrics(self) -> Metrics: ...
    @property
    def eval_dataset(self) -> Sequence[Any]: ...
    def stop(self, reason: str) -> None: ...


class RunExtension:
    """Methods that a run calls; override any of them, with ``def`` or ``async def``.

    ``trainer`` is the running ``RayPPOTrainer``. The run waits for each method, at most
    ``trainer.step_timeout_s`` if it is asynchronous. An exception ends the run with an error.
    ``trainer.stop(reason)`` ends it without one, after the step.
    """

    def on_start(self, trainer: Watched) -> Answer:
        """After models and checkpoint were loaded and weights synced, before any rollout."""

    def on_step_begin(self, trainer: Watched, step: int) -> Answer:
        """Before each step, from 1. With asynchronous plans its rollouts may have begun earlier."""

    def on_rollout(self, trainer: Watched, groups: Sequence[Any]) -> Answer:
        """After each rollout, with its ``skyasync.rollout.types.Group``s; do not change them."""

    def on_step_end(self, trainer: Watched, metrics: Metrics) -> Answer:
        """After each step, before its metrics are logged; may add metrics."""

    def on_weight_update(self, trainer: Watched, version: int) -> Answer:
        """After each weight sync: all engines compute with the weights of this version."""

    def on_evaluate(self, trainer: Watched, metrics: Metrics) -> Answer:
        """After each evaluation."""

    def on_checkpoint(self, trainer: Watched, folder: Path) -> Answer:
        """After a checkpoint is complete."""

    def on_failure(self, trainer: Watched, error: BaseException) -> Answer:
        """After the run has failed. An error in here is added to the first one as a note."""

    def on_end(self, trainer: Watched) -> Answer:
        """After the last step, if nothing failed."""

    def state_dict(self) -> Mapping[str, Any]:
        """The extension's state for checkpoints, as JSON has it.

        That is numbers, strings, booleans, None, and lists and mappings of them. Keys of mappings
        are text when they are loaded.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the ``state_dict`` of the checkpoint that the run resumes from.

        Called before ``on_start``.
        """


class TrainerCallback(RunExtension):
    """A ``RunExtension`` of the user's."""
