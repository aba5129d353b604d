"""The trainer: its loop and components, its plans, extensions and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.rollout.types import Rollout

if TYPE_CHECKING:
    from skyasync.trainer.trainer import RayPPOTrainer

__all__ = ["RayPPOTrainer", "Rollout"]


def __getattr__(name: str) -> object:
    """The trainer is imported when first used: checks read modules of this folder without it."""
    if name != "RayPPOTrainer":
        raise AttributeError(f"module 'skyasync.trainer' has no attribute {name!r}")
    from skyasync.trainer.trainer import RayPPOTrainer

    return RayPPOTrainer
