"""The log of a run's schedule, from which ``skyasync replay`` re-enacts the run.

Invariant: every step of a run with a folder has its line, whatever the plan. Groups that a re-enactment from the newest
checkpoint could not generate are written whole: those with tokens of older weights than the checkpoint's, and those
with a failed episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyasync.callbacks import RunExtension, Watched
from skyasync.rollout.schedule import ScheduledGroup, ScheduledStep
from skyasync.rollout.types import Group, Rollout
from skyasync.trainer.context import RunContext
from skyasync.trainer.extensions.prompt_ledger import PromptLedger, copy_group


class ScheduleLog(RunExtension):
    """Notes groups as they arrive and as they are trained."""

    def __init__(self, context: RunContext, ledger: PromptLedger) -> None:
        self._context, self._ledger = context, ledger
        self._arrived: dict[str, tuple[ScheduledGroup, Group]] = {}  # and not yet trained, as generated
        self._parts: list[tuple[str, ...]] = []  # of the current step
        self._arrivals = 0
        self._saved = 0  # step of the newest checkpoint

    def arrived(self, groups: Sequence[Group]) -> None:
        """These are complete, and no hook has changed them."""
        for group in groups if self._context.run_dir is not None else ():
            name = str(group.prompt.id)
            started = self._ledger.ledger.versions.get(name, self._context.progress.version)
            self._arrived[name] = ScheduledGroup.of(group, started, self._arrivals), copy_group(group)
            self._arrivals += 1

    def prepared(self, groups: Sequence[Group]) -> None:
        """These are trained together; replayed groups are chosen again in a replay."""
        self._parts.append(tuple(str(group.prompt.id) for group in self._context.solved.own(groups)))

    def on_start(self, trainer: Watched) -> None:
        self._saved = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """Nothing; but a checkpoint of the current step is being written."""
        self._saved = self._context.progress.step
        return {}

    def trained(self, step: int, rollout: Rollout) -> tuple[ScheduledStep, list[Group]]:
        """The line of a step, and the groups that are written whole."""
        parts, self._parts = tuple(self._parts), []
        names = [str(group.prompt.id) for group in rollout.groups]
        scheduled = [self._arrived.pop(name) for name in names if name in self._arrived]
        for identity in rollout.rejected:
            self._arrived.pop(str(identity), None)
        whole = [group for about, group in scheduled if about.oldest < self._saved]
        line = ScheduledStep(
            step,
            rollout.position,
            rollout.trained_early,
            tuple(group for group, _ in scheduled),
            parts or (tuple(names),),
            frozenset(str(group.prompt.id) for group in whole),
        )
        return line, whole
