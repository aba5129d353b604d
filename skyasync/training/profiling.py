"""Profiles of some steps: what the workers' processes did, by torch's profiler, in the run's folder.

Invariant: a profile covers all that the workers do from the beginning of its step to its end, and nothing is recorded
in other steps.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from skyasync.observe.run_dir import RunDirectory

if TYPE_CHECKING:
    from skyasync.workers.protocol import WorkerDispatch


class Profiling:
    """Args: ``steps`` are those to be profiled, the first being 1."""

    def __init__(self, steps: Collection[int]) -> None:
        self._steps = frozenset(steps)
        self._open: Path | None = None

    async def begin_step(self, step: int, dispatch: WorkerDispatch, run_dir: RunDirectory | None) -> None:
        if step in self._steps and run_dir is not None:
            self._open = run_dir.path / "profile" / f"step_{step:06d}"
            await dispatch.begin_profile()

    async def end_step(self, dispatch: WorkerDispatch) -> None:
        if self._open is not None:
            folder, self._open = self._open, None
            await dispatch.end_profile(folder)
