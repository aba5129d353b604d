"""The tensor part of a step: from groups to one or more optimizer steps.

Invariant: everything that needs the whole batch (advantages, loss weights, selections) is computed here, before
workers see a part of it. The three policies are told apart by name: behaviour (sampled the tokens), proximal (before
the update), current (with gradient).

    groups ──prepare──▶ batch ──forward_backward, part by part──▶ gradient ──optimizer_step──▶ newer policy
                                                                                  └──finish──▶ metrics of the step
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.together import together
from skyasync.training.drift import drift_metrics
from skyasync.training.length import RunLength
from skyasync.training.numbers import Numbers
from skyasync.training.phases import Metrics, Phases
from skyasync.training.progress import Progress
from skyasync.training.stages import check_experts, joined
from skyasync.workers.roles import CRITIC_ROLE, POLICY, REFERENCE, ROLES, TEACHER_ROLE

if TYPE_CHECKING:  # torch is imported when training starts, so that a wrong setting is refused at once
    from torch import Tensor

    from skyasync.models.batch import RolloutBatch, ScoredBatch, TrainingBatch, UpdateBatch
    from skyasync.workers.protocol import WorkerDispatch


class Learner:
    """Makes the policy better, one training step at a time.

    Attributes:
        dispatch: the models; set when they are up.
        updates: optimizer steps of the training step in hand, those left out included.
        numbers: what is done of those that go wrong.
        trained: the parts that the training step before this moment has trained, until somebody takes them.
    """

    dispatch: WorkerDispatch

    def __init__(self, cfg: Config, progress: Progress, phases: Phases, length: RunLength) -> None:
        from skyasync.algorithms.kl import kl_controller
        from skyasync.algorithms.objective import Objective

        self.objective = Objective(cfg.trainer.algorithm)
        self.kl_controller = kl_controller(cfg.trainer.algorithm)
        self.updates, self.numbers = 0, Numbers(cfg.trainer, phases)
        self._cfg, self._progress, self._phases, self._length = cfg.trainer, progress, phases, length
        critic = ROLES[CRITIC_ROLE]
        self._has_critic, self._critic_within = critic.asked(cfg), critic.hosted_by_policy(cfg)
        own = self._has_critic and not self._critic_within
        self._at_once = own and not critic.shares(cfg)  # on devices of its own it trains beside the policy
        self._has_teacher = ROLES[TEACHER_ROLE].wanted(cfg)
        self._found: dict[str, list[float]] = {}  # by each optimizer step of this training step
        self._parts: list[UpdateBatch] = []  # trained in this training step
        self.trained: list[UpdateBatch] = []
        self._computed = False  # the batch's log-probabilities by the policy before its first update
        self._denominator = 0.0  # of the loss, where the parts' weights lack it

    # ---------------------------------------------------------------- prepare

    def count_rejected(self, groups: int) -> None:
        """So many were left out of the batch in hand: a metric, where any could be."""
        metrics = self._phases.metrics
        if groups > 0 or self._cfg.algorithm.dynamic_sampling.type != "none":
            metrics["dynamic_sampling/rejected"] = metrics.get("dynamic_sampling/rejected", 0.0) + groups

    async def scored(self, sampled: RolloutBatch) -> ScoredBatch:
        """Add the critic's values, and the log-probabilities that the objective needs and no update gives for free, and
        those that a teacher's are compared with.

        With one update per batch the policy before the update is the proximal one, and the update has its
        log-probabilities anyway. Behind an update of the same step that policy is gone, and the engines' own
        log-probabilities are what is left of it.
        """
        from skyasync.models.batch import ScoredBatch

        batch = sampled.to_stage(ScoredBatch)
        if self._cfg.policy.router_replay != "none":
            check_experts(batch)
        groups = len(batch.group_ids.unique())
        needs, early = self.objective.needs, self.objective.needs_before_update
        if "behaviour" in needs:
            self._check_behaviour(batch.behaviour_logprobs[batch.loss_mask])
        if "reference" in needs:
            with self._phases.timed("reference"):
                batch.reference_logprobs = await self.dispatch.ask(REFERENCE, "logprobs", batch)
        several = self._length.updates_per_batch(groups) > 1 and not self._approximates
        proximal = self._has_teacher and not self._cfg.teacher.top_k
        proximal = proximal or "proximal" in early or ("proximal" in needs and several)
        at_once = self._critic_within and proximal and not self.updates
        if self._has_critic:
            with self._phases.timed("values"):
                if at_once:  # in one pass
                    both = await self.dispatch.ask(POLICY, "logprobs_and_values", batch)
                    batch.proximal_logprobs, batch.values = both.unbind(-1)
                else:
                    batch.values = await self.dispatch.ask(CRITIC_ROLE, "values", batch)
        if self._has_teacher:
            with self._phases.timed("teacher"):
                if self._cfg.teacher.top_k:
                    batch.teacher_top_k = await self.dispatch.ask(TEACHER_ROLE, "top_logprobs", batch)
                else:
                    batch.teacher_logprobs = await self.dispatch.ask(TEACHER_ROLE, "logprobs", batch)
        if proximal:
            self._computed = not self.updates
        if proximal and self.updates:
            batch.proximal_logprobs = batch.behaviour_logprobs
        elif proximal and not at_once:
            with self._phases.timed("logprobs"):
                batch.proximal_logprobs = await self.dispatch.ask(POLICY, "logprobs", batch)
        return batch

    def _check_behaviour(self, logprobs: Tensor) -> None:
        algorithm = self._cfg.algorithm
        if logprobs.isnan().any():
            raise UserError(
                f"the generator's output lacks rollout_logprobs, but trainer.algorithm.policy_loss_type="
                f"{algorithm.policy_loss_type} with trainer.algorithm.off_policy_correction="
                f"{algorithm.off_policy_correction} uses the behaviour policy: return them, or choose "
                f"trainer.algorithm.off_policy_correction=none"
            )

    @property
    def _approximates(self) -> bool:
        return self._cfg.algorithm.proximal_logprobs != "recompute"

    # ---------------------------------------------------------------- update

    async def forward_backward(self, part: TrainingBatch, *, complete: bool = True) -> None:
        """Add the gradient of some rows (whole trajectories) of a prepared batch.

        Args:
            complete: the part is its whole mini-batch, so its loss weights are final. If not, the next optimizer step
                divides by the denominator that all parts before it have together, and the gradient is the same.
        """
        batch = self._weighted(part, complete)
        self._choose_proximal(batch, complete)
        if self._has_critic and batch.returns is None:
            raise UserError("compute_advantages_and_returns must set batch.returns, which the critic learns")
        for roles in self._turns:
            async with together() as calls:
                for role in roles:
                    calls.start(self.dispatch.forward_backward(batch, **_of(role)))
        part.proximal_logprobs = batch.proximal_logprobs  # for whoever trains on it again
        self._parts.append(batch)

    def _choose_proximal(self, batch: UpdateBatch, complete: bool) -> None:
        """Where the batch lacks its log-probabilities, and the update does not give them."""
        if self._frozen:
            return
        if self.updates and self._approximates:  # in the first one the current policy is the proximal
            batch.approximated_version = self._progress.step + 1
        elif self.updates and not complete and batch.proximal_logprobs is None:
            batch.proximal_logprobs = batch.behaviour_logprobs

    @property
    def _turns(self) -> list[list[str]]:
        """The roles that are trained now: those of a turn at once, the next turn behind it."""
        if self._critic_within:
            return [[CRITIC_ROLE if self._frozen else POLICY]]
        roles = [*([] if self._frozen else [POLICY]), *([CRITIC_ROLE] if self._has_critic else [])]
        return [roles] if self._at_once else [[role] for role in roles]

    @property
    def _frozen(self) -> bool:
        """The policy is not trained yet: the critic learns to judge it first."""
        return self._has_critic and self._progress.step < self._cfg.critic.warmup_steps

    def _weighted(self, part: TrainingBatch, complete: bool) -> UpdateBatch:
        from skyasync.algorithms.reductions import loss_numerators, loss_weights
        from skyasync.models.batch import UpdateBatch

        algorithm, ids = self._cfg.algorithm, part.trajectory_ids
        if complete:
            weights = loss_weights(algorithm, part.loss_mask, part.group_ids, trajectory_ids=ids)
            selection = self.objective.prepare(part).get("selection")
            return part.to_stage(UpdateBatch, loss_weights=weights, selection=selection)
        weights, denominator = loss_numerators(algorithm, part.loss_mask, part.group_ids, ids)
        self._denominator += denominator
        return part.to_stage(UpdateBatch, loss_weights=weights)

    async def optimizer_step(self) -> Metrics:
        """Change the weights by the gradient that ``forward_backward`` has added up.

        Returns:
            The policy's metrics, and the critic's as ``critic/...``.
        """
        scale, self._denominator = 1.0 / self._denominator if self._denominator else 1.0, 0.0
        found: Metrics = {}
        if self.numbers.skips and (problem := await self._problem(scale)):
            self.numbers.drop(problem)
        else:
            step = self._length.planned_updates + self.updates
            for roles in self._turns:
                async with together() as calls:
                    steps = {r: calls.create_task(self.dispatch.optimizer_step(step, scale, **_of(r))) for r in roles}
                for role, done in steps.items():
                    found |= self._noted(role, done.result())
            self.numbers.updated()
        self.updates += 1
        return found

    async def _problem(self, scale: float) -> str:
        """What is not finite; then the gradients are gone: a batch is learnt from by policy and critic, or by none."""
        roles = [role for turn in self._turns for role in turn]
        problems = [self.numbers.unfit, *[await self.dispatch.examine(scale, role=role) for role in roles]]
        if problem := next(filter(None, problems), ""):
            for role in roles:
                await self.dispatch.drop_gradient(role=role)
        return problem

    def _noted(self, role: str, metrics: Metrics) -> Metrics:
        """An update's, which the step's are made of, by the names that ``optimizer_step`` gives them."""
        for name, value in metrics.items():
            self._found.setdefault(name if name.startswith(f"{CRITIC_ROLE}/") else f"{role}/{name}", []).append(value)
        return metrics if role == POLICY else {f"{role}/{name}": value for name, value in metrics.items()}

    def finish(self, whole: TrainingBatch | None = None) -> Metrics:
        """The metrics of all updates of the training step, which is over.

        Args:
            whole: the batch that all parts were cut from, if they were.
        """
        metrics = {name: sum(values) / len(values) for name, values in self._found.items()}
        if self._parts:
            batch = whole if whole is not None and self.updates > 1 else joined(self._parts)
            metrics |= self._drift(batch) | _foresight(batch)
        self.trained = self._parts
        self._found, self._parts, self.updates, self._computed = {}, [], 0, False
        return metrics

    @property
    def parts(self) -> list[UpdateBatch]:
        """Those of the training step in hand whose gradient was computed."""
        return self._parts

    def take_trained(self) -> list[UpdateBatch]:
        """What the last step has trained; from here on it is the caller's to keep."""
        parts, self.trained = self.trained, []
        return parts

    def _drift(self, batch: TrainingBatch) -> Metrics:
        weigh = self.objective.correction_weights if "behaviour" in self.objective.needs else None
        return drift_metrics(batch, self._progress.step, weigh, exact=self.updates <= 1 or self._computed)


def _of(role: str) -> dict[str, str]:
    """How a dispatch is told the role; one of a program's own may know the policy alone."""
    return {} if role == POLICY else {"role": role}


def _foresight(batch: TrainingBatch) -> Metrics:
    """How well the critic's values, from before its update, foresaw the returns."""
    from skyasync.algorithms.values import value_metrics

    if batch.values is None or batch.returns is None:
        return {}
    found = value_metrics(batch.values, batch.returns, batch.loss_mask)
    return {f"critic/{name}": value for name, value in found.items()}
