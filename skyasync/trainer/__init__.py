"""The trainer: the loop, the parts that it is composed of, its plans, extensions and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyasync.rollout.types import Rollout
    from skyasync.trainer.trainer import RayPPOTrainer

__all__ = ["RayPPOTrainer", "Rollout"]


def __getattr__(name: str) -> object:
    """Imported when first used: modules of this folder are read by checks that do without the trainer."""
    if name not in __all__:
        raise AttributeError(f"module 'skyasync.trainer' has no attribute {name!r}")
    from skyasync.trainer import trainer

    return getattr(trainer, name)
