"""A checkpoint in the trainer's format, without a trainer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from skyasync.trainer.checkpoint.checkpoints import Checkpoints, TrainState


async def saved(
    checkpoints: Checkpoints,
    state: TrainState,
    write: Callable[[Path], Awaitable[Any]],
    config: Mapping[str, Any] | None = None,
) -> Path:
    """``write(folder)`` adds the workers' files, and returns their checksums if it has them."""
    with checkpoints.unfinished(state.step) as unfinished:
        return unfinished.finish(state, await write(unfinished.path), config)
