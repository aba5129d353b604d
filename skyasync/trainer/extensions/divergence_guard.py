"""The divergence guard: updates that are not finite, and metrics beyond a limit.

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
SHOWN_EPISODES = 3  # by name, in a message


def bad_rewards(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories whose reward is not finite."""
    trajectories = []
    for group in groups:
        trajectories += [
            trajectory for trajectory in group.trajectories if not math.isfinite(trajectory.reward)
        ]
    return trajectories


def describe(trajectories: Sequence[Trajectory]) -> str:
    """``bad_rewards`` in words."""
    if not trajectories:
        return ""
    descriptions = [
        f"{trajectory.id}: {trajectory.reward}" for trajectory in trajectories[:SHOWN_EPISODES]
    ]
    if len(trajectories) > SHOWN_EPISODES:
        descriptions.append("...")
    episodes = "1 episode" if len(trajectories) == 1 else f"{len(trajectories)} episodes"
    return f"the reward of {episodes} is not finite ({', '.join(descriptions)})"


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
        self.skips = self._cfg.on_nonfinite == "skip"
        self.rolls_back = self._cfg.on_spike == "rollback"
        self.unfit = ""
        self._dropped_updates = 0  # in a row
        self._undone_steps = 0  # in a row
        self._checked_values: dict[str, float] = {}  # metrics of the current step
        self._seen_metrics: set[str] = set()  # of ``spike_limits``, in any step

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        self.spikes(metrics)
        if "policy/loss" in metrics:  # a step that trained nothing lacks other metrics too
            for name in self._cfg.spike_limits.keys() - self._seen_metrics - metrics.keys():
                # Metrics of the library and of evaluations are not in every step.
                if not name.startswith("eval/") and not is_documented(name):
                    hint = nearest_metric(name, metrics)
                    raise UserError(
                        f"trainer.spike_limits names {name}, and a step has no such metric: {hint}"
                    )
        self._checked_values = {}

    def state_dict(self) -> Mapping[str, Any]:
        if self._seen_metrics:
            return {"seen": sorted(self._seen_metrics)}
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen_metrics = set(state["seen"])

    # ---------------------------------------------------------------- not finite

    def check_rewards(self, groups: Sequence[Group], *, trained: bool = False) -> None:
        """Log rewards that are not finite.

        Args:
            trained: the groups are those of the current step. If a reward is not finite, no update
                is made of them.

        Raises:
            NonFiniteError: if they end the run.
        """
        trajectories = bad_rewards(groups)
        if not trajectories:
            return
        problem = describe(trajectories)
        if not self.skips:
            raise NonFiniteError(f"{problem} (trainer.on_nonfinite=raise)")
        log.warning("step %d: %s", self._phases.step, problem)
        if trained:
            self._count(REWARDS, len(trajectories))
            self.unfit = problem

    def drop(self, problem: str) -> None:
        """Count an update that is left out."""
        self._dropped_updates += 1
        self._count(SKIPPED)
        log.warning(
            "step %d: an optimizer step is left out, weights and optimizer state stay as they were: %s; that is %d of "
            "%d in a row (trainer.max_bad_steps)",
            self._phases.step,
            problem,
            self._dropped_updates,
            self._cfg.max_bad_steps,
        )

    def count_update(self) -> None:
        """Count an update that was made."""
        # A count that ends the run stays until ``check_dropped``, at the end of the step.
        if self._dropped_updates < self._cfg.max_bad_steps:
            self._dropped_updates = 0

    @property
    def dropped(self) -> bool:
        """Whether an update of the current step was left out."""
        return bool({SKIPPED, REWARDS} & self._phases.metrics.keys())

    def check_dropped(self) -> None:
        """End the step. Raises NonFiniteError if too many updates in a row were left out."""
        self.unfit = ""
        if self._dropped_updates >= self._cfg.max_bad_steps:
            raise NonFiniteError(
                f"{self._dropped_updates} optimizer steps in a row were not finite (trainer.max_bad_steps): "
                f"the policy may be broken; resume from an earlier checkpoint with trainer.resume_mode=STEP "
                f"and a lower learning rate"
            )

    # ---------------------------------------------------------------- too large

    def spikes(self, metrics: Mapping[str, float]) -> list[str]:
        """Log and count the metrics that are beyond their limits, once per step.

        Returns:
            A line for each new one.

        Raises:
            UserError: if a spike ends the run.
        """
        lines = []
        for name, limit in self._cfg.spike_limits.items():
            value = metrics.get(name)
            # Values are checked after the update, and those of callbacks at the end of the step.
            if value is None or self._checked_values.get(name) == value:
                continue
            self._checked_values[name] = value
            self._seen_metrics.add(name)
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
            self._undone_steps = 0
            return False
        self._undone_steps += 1
        if self._undone_steps >= self._cfg.max_bad_steps:
            raise UserError(
                f"step {self._phases.step}: rolled back {self._undone_steps} steps in a row (trainer.max_bad_steps="
                f"{self._cfg.max_bad_steps}): {lines[0]}; lower trainer.policy.optimizer_config.lr, or raise the limit "
                f"in trainer.spike_limits"
            )
        return True

    def undone(self, step: int) -> None:
        """Note that the models are those of an earlier step again.

        A run that resumes from here leaves the data of the undone steps out too.
        """
        self._phases.metrics[UNDONE] = float(step)
        log.warning(
            "step %d: weights and optimizer state are those of step %d again; the data since is not trained another "
            "time (trainer.on_spike=rollback)",
            self._phases.step,
            step,
        )

    def _count(self, name: str, count: int = 1) -> None:
        self._phases.metrics[name] = self._phases.metrics.get(name, 0.0) + count
