"""Replay of solved groups (``data.replay_groups``): rarely solved prompts are trained once more.

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
from skyasync.rollout import partial_rollouts
from skyasync.rollout.types import Group, Prompt, PromptId

FILE = "solved.safetensors"
# Of a replayed group, in policy versions: older samples are too far off-policy to be corrected.
MAX_STALENESS = 16


class SolvedGroups:
    """The groups that may be replayed, and those that are replayed in the current step.

    Attributes:
        replayed: in the current step.
    """

    def __init__(self, cfg: DataConfig) -> None:
        self._count = cfg.replay_groups
        self._passing = cfg.sampler_passing
        # With the step that trained them, in their order.
        self._candidates: list[tuple[int, Group]] = []
        self.replayed: list[Group] = []

    def draw(self, step: int) -> list[Group]:
        """Choose the groups to be trained in addition, each once: the most difficult.

        Of equally difficult ones the oldest come first.

        Args:
            step: training steps done.
        """
        candidates = []
        for trained_step, group in self._candidates:
            if step - group.oldest_version <= MAX_STALENESS:
                candidates.append((trained_step, group))
        # Sorting is stable: groups of one pass rate stay in the order of their steps.
        groups = sorted((group for _, group in candidates), key=self._pass_rate)
        self.replayed = groups[: self._count]
        replayed = set(map(id, self.replayed))
        self._candidates = [entry for entry in candidates if id(entry[1]) not in replayed]
        return self.replayed

    def without_replayed(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of the step itself."""
        # By identity: groups are compared by their contents, which takes long.
        replayed = set(map(id, self.replayed))
        return [group for group in groups if id(group) not in replayed]

    def trained(self, groups: Sequence[Group], step: int) -> None:
        """Add groups that a step has trained for the first time.

        Only those that some samples, and at most half of them, have solved may be replayed.
        """
        if not self._count:
            return
        for group in groups:
            # A reward that is not finite would spoil the step that replays it.
            if all(map(isfinite, group.rewards)) and 0 < self._pass_rate(group) <= 0.5:
                self._candidates.append((step, group))

    def undo(self, step: int) -> None:
        """Forget the groups of steps after this one, which have been undone."""
        self._candidates = [entry for entry in self._candidates if entry[0] <= step]

    def _pass_rate(self, group: Group) -> float:
        passed = [trajectory.reward >= self._passing for trajectory in group.played]
        return sum(passed) / max(len(passed), 1)

    def save(self, folder: Path) -> None:
        """Write the groups that may still be replayed into a checkpoint."""
        if self._candidates:
            groups = [group for _, group in self._candidates]
            partial_rollouts.write(folder / FILE, partial_rollouts.RolloutState({}, groups))

    def resume(self, folder: Path, prompt: Callable[[PromptId], Prompt]) -> None:
        """Continue with the groups of a checkpoint.

        Args:
            prompt: by its identity.
        """
        self._candidates = []
        if self._count and (folder / FILE).exists():
            state = partial_rollouts.read(folder / FILE, prompt)
            # Step 0, because no step of a checkpoint is undone.
            self._candidates = [(0, group) for group in state.groups]
