"""Updates that are left out because they are not finite, and metrics that are beyond a limit.

Invariant: updates that are left out and steps that are undone are logged and counted in the step's
metrics; ``max_bad_steps`` of them in a row end the run. Every decision is made here, in one
process, from values that all ranks share: all ranks act alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from skyasync.callbacks import RunExtension, Watched
from skyasync.errors import NonFiniteError, UserError
from skyasync.rollout.types import Group, Trajectory
from skyasync.trainer.context import RunContext
from skyasync.trainer.extensions import is_documented, nearest_metric

log = logging.getLogger(__name__)

SKIPPED = "nonfinite/skipped"
REWARDS = "nonfinite/rewards"
SPIKES = "spikes/count"
UNDONE = "spikes/rolled_back_to"
NAMED = 3  # episodes by name, of those whose rewards are not finite


def bad_rewards(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories whose reward is not finite."""
    return [t for group in groups for t in group.trajectories if not math.isfinite(t.reward)]


def describe(bad: Sequence[Trajectory]) -> str:
    """``bad_rewards`` in words."""
    shown = ", ".join(f"{t.id}: {t.reward}" for t in bad[:NAMED]) + (
        ", ..." if len(bad) > NAMED else ""
    )
    if bad:
        return f"the reward of {len(bad)} episode{'s' * (len(bad) > 1)} is not finite ({shown})"
    return ""


class DivergenceGuard(RunExtension):
    """Decides which updates of a run are left out, and which steps are undone.

    Attributes:
        skips: an update that is not finite is left out.
        rolls_back: a spike is undone.
        unfit: why the current step must not be learned from, "" if it may.
    """

    def __init__(self, context: RunContext) -> None:
        self._cfg = context.cfg.trainer
        self._phases = context.phases
        self.skips, self.rolls_back = (
            self._cfg.on_nonfinite == "skip",
            self._cfg.on_spike == "rollback",
        )
        self.unfit = ""
        self._dropped = 0  # updates in a row
        self._undone = 0  # steps in a row
        self._checked: dict[str, float] = {}  # metrics of the current step
        self._seen: set[str] = set()  # names in ``spike_limits`` that some step had

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        self.spikes(metrics)
        if "policy/loss" in metrics:  # else nothing was trained
            for name in self._cfg.spike_limits.keys() - self._seen - metrics.keys():
                if not name.startswith("eval/") and not is_documented(
                    name
                ):  # which are not in every step
                    hint = nearest_metric(name, metrics)
                    raise UserError(
                        f"trainer.spike_limits names {name}, and a step has no such metric: {hint}"
                    )
        self._checked = {}

    def state_dict(self) -> Mapping[str, Any]:
        if self._seen:
            return {"seen": sorted(self._seen)}
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = set(state["seen"])

    # ---------------------------------------------------------------- not finite

    def check_rewards(self, groups: Sequence[Group], *, trained: bool = False) -> None:
        """Log rewards that are not finite.

        Args:
            trained: the groups are those of the current step: no update is made of them, if some
                are not finite.

        Raises:
            NonFiniteError: if they end the run.
        """
        bad = bad_rewards(groups)
        if not bad:
            return
        problem = describe(bad)
        if not self.skips:
            raise NonFiniteError(f"{problem} (trainer.on_nonfinite=raise)")
        log.warning("step %d: %s", self._phases.step, problem)
        if trained:
            self._count(REWARDS, len(bad))
            self.unfit = problem

    def drop(self, problem: str) -> None:
        """An update is left out."""
        self._dropped += 1
        self._count(SKIPPED)
        log.warning(
            "step %d: an optimizer step is left out, weights and optimizer state stay as they were: %s; that is %d of "
            "%d in a row (trainer.max_bad_steps)",
            self._phases.step,
            problem,
            self._dropped,
            self._cfg.max_bad_steps,
        )

    def count_update(self) -> None:
        """An update was not left out."""
        if self._dropped < self._cfg.max_bad_steps:
            self._dropped = 0

    @property
    def dropped(self) -> bool:
        """Something of the current step was left out."""
        return bool({SKIPPED, REWARDS} & self._phases.metrics.keys())

    def check_dropped(self) -> None:
        """The step is over. Raises NonFiniteError if too many updates in a row were left out."""
        self.unfit = ""
        if self._dropped >= self._cfg.max_bad_steps:
            raise NonFiniteError(
                f"{self._dropped} optimizer steps in a row were not finite (trainer.max_bad_steps): the policy may be "
                f"broken; resume from an earlier checkpoint with trainer.resume_mode=STEP and a lower learning rate"
            )

    # ---------------------------------------------------------------- too large

    def spikes(self, metrics: Mapping[str, float]) -> list[str]:
        """A line for each metric that is beyond its limit and was not before in this step; it is
        logged and counted.

        Raises:
            UserError: if it ends the run.
        """
        lines = []
        for name, limit in self._cfg.spike_limits.items():
            value = metrics.get(name)
            if value is None or self._checked.get(name) == value:
                continue
            self._checked[name] = value
            self._seen.add(name)
            if value > limit:
                lines.append(
                    f"{name}={value:.4g} is beyond its limit, {limit:g} (trainer.spike_limits)"
                )
        for line in lines:
            self._count(SPIKES)
            log.warning("step %d: %s", self._phases.step, line)
        if lines and self._cfg.on_spike == "raise":
            raise UserError(
                f"step {self._phases.step}: {lines[0]}, which ends the run (trainer.on_spike=raise)"
            )
        return lines

    def must_undo(self, metrics: Mapping[str, float]) -> bool:
        """Whether a step with these metrics is undone.

        Raises:
            UserError: if it is one too many in a row, or a spike ends the run.
        """
        lines = self.spikes(metrics)
        if not (lines and self.rolls_back):
            self._undone = 0
            return False
        self._undone += 1
        if self._undone >= self._cfg.max_bad_steps:
            raise UserError(
                f"step {self._phases.step}: rolled back {self._undone} steps in a row (trainer.max_bad_steps="
                f"{self._cfg.max_bad_steps}): {lines[0]}; lower trainer.policy.optimizer_config.lr, or raise the limit "
                f"in trainer.spike_limits"
            )
        return True

    def undone(self, step: int) -> None:
        """The models are what they were after that step; a run that resumes from here leaves the
        data out too."""
        self._phases.metrics[UNDONE] = float(step)
        log.warning(
            "step %d: weights and optimizer state are those of step %d again; the data since is not trained another "
            "time (trainer.on_spike=rollback)",
            self._phases.step,
            step,
        )

    def _count(self, name: str, many: int = 1) -> None:
        self._phases.metrics[name] = self._phases.metrics.get(name, 0.0) + many
