"""Hooks for code that watches a run without being part of its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TrainerCallback:
    """Override what you need; ``trainer`` is the running ``RayPPOTrainer``. An exception ends the run."""

    def on_train_begin(self, trainer: Any) -> None:
        """Parts are up, a checkpoint is loaded, weights are synced; nothing has been generated."""

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """After each step, with everything that is about to be logged; may add metrics."""

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """After each evaluation."""

    def on_checkpoint(self, trainer: Any, folder: Path) -> None:
        """After a checkpoint is complete."""

    def on_train_end(self, trainer: Any) -> None:
        """After the last step, if nothing failed."""
