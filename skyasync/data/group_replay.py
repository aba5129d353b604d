"""Replay of solved groups: samples that earned a rare reward are trained once more
(``data.replay_groups``).

Pure but for ``save`` and ``resume``: no clock, no random numbers. Invariant: which groups are
replayed is a function of the groups that were trained, in their order, and checkpoints keep those
that may still be replayed. So a resumed run, and ``skyasync replay``, train again on the same
groups. A replayed group keeps its tokens, versions and the log-probabilities of the engine: the
off-policy correction weighs it like any other stale sample. The prompt ledger does not see it: its
prompt was trained when its step was.

Sources: replay of groups with right samples is Zhang et al. 2025 (RLEP, arXiv 2507.07451); hard
ones first, and none that is always solved, is Zhan et al. 2025 (ExGRPO, 2510.02245).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path

from skyasync.config.schema import DataConfig
from skyasync.rollout import partial_rollouts as saved
from skyasync.rollout.types import Group, Prompt, PromptId

FILE = "solved.safetensors"
MAX_STALENESS = 16  # of a replayed group, in policy versions


class SolvedGroups:
    """The groups that may be replayed, and those that are replayed in the current step.

    Attributes:
        drawn: in the current step.
    """

    def __init__(self, cfg: DataConfig) -> None:
        self._count = cfg.replay_groups
        self._passing = cfg.sampler_passing
        self._candidates: list[
            tuple[int, Group]
        ] = []  # with the step that trained them, in their order
        self.drawn: list[Group] = []

    def draw(self, step: int) -> list[Group]:
        """The groups to be trained in addition, each for the last time: the most difficult, among
        them the oldest.

        Args:
            step: training steps done.
        """
        candidates = [
            (when, each)
            for when, each in self._candidates
            if step - each.oldest_version <= MAX_STALENESS
        ]
        self.drawn = sorted((each for _, each in candidates), key=self._pass_rate)[: self._count]
        drawn = set(map(id, self.drawn))
        self._candidates = [(when, each) for when, each in candidates if id(each) not in drawn]
        return self.drawn

    def own(self, groups: Sequence[Group]) -> list[Group]:
        """Those of the step itself: not replayed ones."""
        drawn = set(map(id, self.drawn))
        return [group for group in groups if id(group) not in drawn]

    def trained(self, groups: Sequence[Group], step: int) -> None:
        """This step has trained these for the first time; kept are those that at most half of the
        samples have solved.

        One with a reward that is not finite would spoil the step that replays it.
        """
        if self._count:
            fit = [group for group in groups if all(map(isfinite, group.rewards))]
            self._candidates += [
                (step, group) for group in fit if 0 < self._pass_rate(group) <= 0.5
            ]

    def undo(self, step: int) -> None:
        """The steps after this one have been undone, and their data is not trained another time."""
        self._candidates = [(when, group) for when, group in self._candidates if when <= step]

    def _pass_rate(self, group: Group) -> float:
        right = [trajectory.reward >= self._passing for trajectory in group.played]
        return sum(right) / max(len(right), 1)

    def save(self, folder: Path) -> None:
        """Write the groups that are left into a checkpoint."""
        if self._candidates:
            saved.write(
                folder / FILE, saved.RolloutState({}, [group for _, group in self._candidates])
            )

    def resume(self, folder: Path, prompt: Callable[[PromptId], Prompt]) -> None:
        """Take over a checkpoint's groups.

        Args:
            prompt: by its identity.
        """
        saved_groups = self._count and (folder / FILE).exists()
        if saved_groups:
            groups = saved.read(folder / FILE, prompt).groups
        else:
            groups = []
        self._candidates = [(0, group) for group in groups]  # of steps that are in the checkpoint
