"""Numbers that go wrong: updates that are left out since they are not finite, and metrics that are beyond a limit.

Invariant: what is left out or undone is said in a line, counted in the step's metrics, and ends the run when it comes
``max_bad_steps`` times in a row. Every decision is made here, in one process, of numbers that all ranks share: no rank
can take another than its neighbours.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from skyasync.config.schema import TrainerConfig
from skyasync.errors import NonFiniteError, UserError, nearest
from skyasync.rollout.types import Group, Trajectory
from skyasync.training.phases import Phases

log = logging.getLogger(__name__)

SKIPPED, REWARDS = "nonfinite/skipped", "nonfinite/rewards"
SPIKES, UNDONE = "spikes/count", "spikes/rolled_back_to"
NAMED = 3  # episodes by name, of those whose rewards are not finite


def bad_rewards(groups: Sequence[Group]) -> list[Trajectory]:
    """Those whose reward is not finite."""
    return [t for group in groups for t in group.trajectories if not math.isfinite(t.reward)]


def describe(bad: Sequence[Trajectory]) -> str:
    """``bad_rewards`` in words."""
    shown = ", ".join(f"{t.id}: {t.reward}" for t in bad[:NAMED]) + (", ..." if len(bad) > NAMED else "")
    return f"the reward of {len(bad)} episode{'s' * (len(bad) > 1)} is not finite ({shown})" if bad else ""


class Numbers:
    """Of one run.

    Attributes:
        skips: an update that is not finite is left out.
        rolls_back: a spike is undone.
        unfit: why the step in hand may not be learnt from, "" if it may.
    """

    def __init__(self, cfg: TrainerConfig, phases: Phases) -> None:
        self.skips, self.rolls_back = cfg.on_nonfinite == "skip", cfg.on_spike == "rollback"
        self.unfit = ""
        self._cfg, self._phases = cfg, phases
        self._dropped = 0  # updates in a row
        self._undone = 0  # steps in a row
        self._judged: dict[str, float] = {}  # metrics of the step in hand
        self._seen: set[str] = set()  # names in ``spike_limits`` that some step had

    # ---------------------------------------------------------------- not finite

    def look_at(self, groups: Sequence[Group]) -> None:
        """Rewards that are not finite: no update of the step in hand is made of them, or of what is beside them.

        Raises:
            NonFiniteError: if they are to end the run.
        """
        if problem := self.check_rewards(groups):
            self._count(REWARDS, len(bad_rewards(groups)))
            self.unfit = problem

    def check_rewards(self, groups: Sequence[Group]) -> str:
        """What is wrong with them, "" for nothing; it is told.

        Raises:
            NonFiniteError: if it is to end the run.
        """
        problem = describe(bad_rewards(groups))
        if problem and not self.skips:
            raise NonFiniteError(f"{problem} (trainer.on_nonfinite=raise)")
        if problem:
            log.warning("step %d: %s", self._phases.step, problem)
        return problem

    def drop(self, problem: str) -> None:
        """An update is left out."""
        self._dropped += 1
        self._count(SKIPPED)
        log.warning(
            "step %d: an optimizer step is left out, weights and moments stay as they were: %s; that is %d of %d in a "
            "row (trainer.max_bad_steps)",
            self._phases.step, problem, self._dropped, self._cfg.max_bad_steps,
        )  # fmt: skip

    def updated(self) -> None:
        """An update was not left out."""
        if self._dropped < self._cfg.max_bad_steps:
            self._dropped = 0

    @property
    def dropped(self) -> bool:
        """Something of the step in hand was left out."""
        return bool({SKIPPED, REWARDS} & self._phases.metrics.keys())

    def check_dropped(self) -> None:
        """The step is over. Raises NonFiniteError if too many updates in a row were left out."""
        self.unfit = ""
        if self._dropped >= self._cfg.max_bad_steps:
            raise NonFiniteError(
                f"{self._dropped} optimizer steps in a row were not finite (trainer.max_bad_steps): the policy may be "
                f"broken; go on from an earlier checkpoint with trainer.resume_mode=STEP and a lower learning rate"
            )

    # ---------------------------------------------------------------- too large

    def spikes(self, metrics: Mapping[str, float], *, complete: bool = False) -> list[str]:
        """What is beyond its limit and was not before in this step, in words; each is told and counted.

        Args:
            complete: these are all metrics of the step.

        Raises:
            UserError: if it is to end the run, or there is no such metric.
        """
        found = []
        for name, limit in self._cfg.spike_limits.items():
            value = metrics.get(name)
            if value is None or self._judged.get(name) == value:
                continue
            self._judged[name] = value
            self._seen.add(name)
            if value > limit:
                found.append(f"{name}={value:.4g} is beyond its limit, {limit:g} (trainer.spike_limits)")
        if complete:
            self._check_names(metrics)
            self._judged = {}
        for line in found:
            self._count(SPIKES)
            log.warning("step %d: %s", self._phases.step, line)
        if found and self._cfg.on_spike == "raise":
            raise UserError(f"step {self._phases.step}: {found[0]}, which ends the run (trainer.on_spike=raise)")
        return found

    def undo(self, lines: Sequence[str]) -> None:
        """A step is to be undone.

        Raises:
            UserError: if it is one too many in a row.
        """
        self._undone += 1
        if self._undone >= self._cfg.max_bad_steps:
            raise UserError(
                f"step {self._phases.step}: rolled back {self._undone} steps in a row (trainer.max_bad_steps="
                f"{self._cfg.max_bad_steps}): {lines[0]}; lower trainer.policy.optimizer_config.lr, or raise the limit "
                f"in trainer.spike_limits"
            )

    def undone(self, step: int) -> None:
        """The models are what they were behind that step."""
        self._phases.metrics[UNDONE] = float(step)
        log.warning("step %d: weights and moments are those of step %d again; what was trained since is not trained "
                    "another time (trainer.on_spike=rollback)", self._phases.step, step)  # fmt: skip

    @property
    def undid(self) -> bool:
        """The step in hand was undone: a run that goes on from here is to leave its data out too."""
        return UNDONE in self._phases.metrics

    def went_well(self) -> None:
        """Nothing of this step is undone."""
        self._undone = 0

    def _check_names(self, metrics: Mapping[str, float]) -> None:
        if "policy/loss" not in metrics:  # nothing was trained
            return
        for name in self._cfg.spike_limits.keys() - self._seen - metrics.keys():
            if not name.startswith(("eval/", "sync/")):  # which are not in every step
                close = nearest(name, metrics, count=1)
                hint = f"did you mean {close[0]}?" if close else "metrics.jsonl has their names"
                raise UserError(f"trainer.spike_limits names {name}, and a step has no such metric: {hint}")

    def _count(self, name: str, many: int = 1) -> None:
        self._phases.metrics[name] = self._phases.metrics.get(name, 0.0) + many
