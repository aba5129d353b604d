"""Profiles of some steps (``trainer.profile_steps``): what the workers' processes did, by torch's profiler."""

from __future__ import annotations

from pathlib import Path

from skyasync.callbacks import RunExtension, Watched
from skyasync.trainer.context import RunContext


class Profiler(RunExtension):
    """A profile covers all that the workers do from the beginning of its step to its last update."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._steps = context, frozenset(context.cfg.trainer.profile_steps)
        self._open: Path | None = None

    async def on_step_begin(self, trainer: Watched, step: int) -> None:
        if step in self._steps and self._context.run_dir is not None:
            self._open = self._context.run_dir.path / "profile" / f"step_{step:06d}"
            await self._context.dispatch.begin_profile()

    async def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        if self._open is not None:
            folder, self._open = self._open, None
            await self._context.dispatch.end_profile(folder)
