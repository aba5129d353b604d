"""Hooks for code that watches a run without being part of its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Watched(Protocol):
    """What a callback may count on of the trainer it watches, which is the ``RayPPOTrainer`` itself."""

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


class TrainerCallback:
    """Override what you need; ``trainer`` is the running ``RayPPOTrainer``. An exception ends the run."""

    def on_train_begin(self, trainer: Watched) -> None:
        """Parts are up, a checkpoint is loaded, weights are synced; nothing has been generated."""

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        """After each step, with everything that is about to be logged; may add metrics."""

    def on_evaluate(self, trainer: Watched, metrics: dict[str, float]) -> None:
        """After each evaluation."""

    def on_checkpoint(self, trainer: Watched, folder: Path) -> None:
        """After a checkpoint is complete."""

    def on_train_end(self, trainer: Watched) -> None:
        """After the last step, if nothing failed."""
