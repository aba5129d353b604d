"""Where a run stood when its engines were given weights, so that it can go on from the weights that they hold.

Invariant: of ``trainer.restart_from=engines``. What the controller knows (progress, prompts, finished rollouts, the KL
coefficient) is never older than the weights that a run goes on from, and goes back with them only: over steps whose
weights no engine has been given. Their prompts are then open again, and are trained as they were rolled out.

```
 sync of version 4        step 5 trained, its workers die       the engines hold 4: position, coefficient of 4;
   a mark of 4      ──▶     before its sync has ended     ──▶     the prompts of step 5 open, their groups finished
```

A sync that did not end may have reached an engine: the newest version that one holds, and of which there is a mark,
counts. The optimizer's moments died with the workers: they are those of the newest checkpoint, or begin anew.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol, cast

from skyasync.config.schema import Config
from skyasync.rollout.saved import Kept
from skyasync.state.checkpoint import TrainState
from skyasync.training.bookkeeping import Bookkeeping
from skyasync.training.learner import Learner
from skyasync.training.phases import Metrics, Phases
from skyasync.training.progress import Progress
from skyasync.training.saving import Saving
from skyasync.workers.roles import CRITIC_ROLE, POLICY, ROLES

log = logging.getLogger(__name__)


class Holders(Protocol):
    """The engines, of a backend that ``hands_back``."""

    async def held_versions(self) -> Mapping[int, int]: ...
    async def hand_back(self, engine: int, folder: str) -> str | None: ...


class Mark(NamedTuple):
    """``place``: how many steps the book of prompts had closed."""

    state: TrainState
    place: int


class Survived(NamedTuple):
    """What a trainer leaves whose workers have died.

    Args:
        marks: by version, of weights that engines may hold.
        kept: the prompts that were open at a place of the book, or have been closed since, and their groups.
        unlogged: of the last step, if it was trained and its metrics were not logged.
    """

    marks: Mapping[int, Mark]
    kept: Callable[[int], Kept]
    unlogged: tuple[int, Metrics] | None


class Marks:
    """Attributes: former: of the trainer before this one, whose workers have died; None of the first."""

    def __init__(
        self,
        cfg: Config,
        holders: object,
        progress: Progress,
        phases: Phases,
        learner: Learner,
        book: Bookkeeping,
        saving: Saving,
    ) -> None:
        self.former: Survived | None = None
        self._cfg, self._holders, self._progress, self._phases = cfg, cast(Holders, holders), progress, phases
        self._learner, self._book, self._saving = learner, book, saving
        self._wanted = cfg.trainer.restart_from == "engines"
        self._marks: dict[int, Mark] = {}

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Around a sync: engines hold the version before, and any of them may hold this one from here on."""
        version = self._progress.step
        if self._wanted:
            self._mark(version)
        yield
        if self._wanted:
            self._marks = {version: self._marks[version]}
            self._book.forget(self._marks[version].place)

    def _mark(self, version: int) -> None:
        self._marks[version] = Mark(self._saving.state(), self._book.place)

    def survived(self) -> Survived | None:
        """What is left of this trainer; if it had not begun, of the one before it. None without the setting."""
        if not self._marks:
            return self.former
        logged = not self._phases.step or self._progress.step < self._phases.step
        return Survived(
            self._marks, self._book.since, None if logged else (self._progress.step, dict(self._phases.metrics))
        )

    async def go_on(self, *, resumed: bool) -> tuple[int, Metrics] | None:
        """Make models and progress what engines and controller know, where that is no older than the checkpoint.

        Args:
            resumed: one was loaded.

        Returns:
            the step that is done and was not logged, with its metrics.
        """
        if self.former is None:
            return None
        former, loaded = self.former, self._progress.step
        async with self._phases.limited("loading of the engines' weights"):
            version = await self._newest(former.marks, loaded)
            if version > loaded and not await self._take(version, loaded if resumed else None):
                version = -1
        if version < loaded:
            log.warning("no engine holds weights as new as those of step %d, from which the run goes on", loaded)
            return None
        if version == loaded:
            log.info("the engines hold version %d, as the workers do: what was rolled out since is kept", version)
        mark = former.marks[version]
        self._saving.stand_at(mark.state)
        self._book.restore(former.kept(mark.place))
        self._mark(version)
        return former.unlogged if former.unlogged and former.unlogged[0] == version else None

    async def _newest(self, marks: Mapping[int, Mark], loaded: int) -> int:
        """The newest version that an engine holds and of which there is a mark; -1 if there is none."""
        held = (await self._holders.held_versions()).values()
        return max((version for version in held if version in marks and version >= loaded), default=-1)

    async def _take(self, version: int, saved: int | None) -> bool:
        """Have the policy's ranks load the weights of an engine; false if those that hold this version have died."""
        from skyasync.weight_sync.transfers.file import remove_weights  # by torch, without which a refusal is quicker

        folder = self._cfg.generator.weight_sync_dir
        for engine, held in (await self._holders.held_versions()).items():
            path = await self._holders.hand_back(engine, folder) if held == version else None
            if path is None:
                continue
            dispatch = self._learner.dispatch
            try:
                rounded = any(await dispatch.call(POLICY, "take_weights", path))
                await dispatch.call(POLICY, "release", path)  # on their machine
            finally:
                remove_weights(path)
            self._tell(engine, version, saved, rounded=rounded)
            return True
        return False

    def _tell(self, engine: int, version: int, saved: int | None, *, rounded: bool) -> None:
        moments, critic = "begin anew, as there is no checkpoint", ""
        if saved is not None:
            moments = f"are those of the checkpoint of step {saved}, {version - saved} steps old"
        if ROLES[CRITIC_ROLE].asked(self._cfg):
            critic = ", and so is the critic" if saved is not None else ", and so does the critic"
        log.warning(
            "the policy goes on from version %d, as engine %d holds it%s; the optimizer's moments %s%s",
            version, engine, " (rounded: the engines' dtype is shorter)" if rounded else "", moments, critic,
        )  # fmt: skip
