"""The tensor part of a step: from groups to one or more optimizer steps.

Invariant: everything that needs the whole batch (advantages, loss weights, selections) is computed
before workers see a part of it. The three policies are told apart by name: behaviour (sampled the
tokens), proximal (before the update), current (with gradient).

    groups ──prepare──▶ batch ──forward_backward, part by part──▶ gradient ──optimizer_step──▶ newer
    policy
                                                                                  └──finish──▶
                                                                                  metrics of the
                                                                                  step
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.rollout.types import Group
from skyasync.trainer.context import Metrics, RunContext
from skyasync.trainer.extensions.divergence_guard import DivergenceGuard
from skyasync.trainer.extensions.staleness_control import StalenessControl
from skyasync.utils.task_group import together
from skyasync.workers.roles import CRITIC_ROLE, POLICY, REFERENCE, ROLES, TEACHER_ROLE

if (
    TYPE_CHECKING
):  # torch is imported when training starts, so that a wrong setting is refused at once
    from skyasync.algorithms.objective import Objective
    from skyasync.models.batch import RolloutBatch, ScoredBatch, TrainingBatch, UpdateBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoringPlan:
    """The tensors that are added to a batch before it is trained, by the settings.

    With one update per batch the policy before the update is the proximal one, and the update has
    its log-probabilities anyway. With several they are computed before the first, unless the
    objective approximates them.
    """

    experts: bool  # must be known: they are replayed
    behaviour: bool  # log-probabilities must be known
    reference: bool
    teacher: Literal["", "logprobs", "top_logprobs"]
    values: bool
    values_by_policy: bool  # by a head on its layers
    proximal: Literal["never", "several updates", "always"]

    @classmethod
    def of(cls, cfg: Config, objective: Objective) -> ScoringPlan:
        trainer = cfg.trainer
        critic = ROLES[CRITIC_ROLE]
        teacher = ROLES[TEACHER_ROLE].has_ranks(cfg)
        compared = (
            teacher and not trainer.teacher.top_k
        )  # the policy's log-probabilities with the teacher's
        proximal: Literal["never", "several updates", "always"] = "never"
        if compared or "proximal" in objective.needs_before_update:
            proximal = "always"
        elif "proximal" in objective.needs and trainer.algorithm.proximal_logprobs == "recompute":
            proximal = "several updates"
        return cls(
            experts=trainer.policy.router_replay != "none",
            behaviour="behaviour" in objective.needs,
            reference="reference" in objective.needs,
            teacher="" if not teacher else "logprobs" if compared else "top_logprobs",
            values=critic.enabled_if(cfg),
            values_by_policy=critic.enabled_if(cfg) and critic.hosted_by_policy(cfg),
            proximal=proximal,
        )

    def needs_proximal(self, updates: int) -> bool:
        """Whether proximal log-probabilities are computed for a batch of so many updates."""
        return self.proximal == "always" or (self.proximal == "several updates" and updates > 1)


class Learner:
    """Makes the policy better, one training step at a time.

    Attributes:
        groups: that were prepared since the last step's end; of other rollouts too, if a plan
            replays.
        updates: optimizer steps of the current training step, those left out included.
        parts: batches of the current training step whose gradient was computed.
        trained: the parts of the training step before.
        guard: decides about updates and rewards that are not finite.
        control: chooses the policy's step size, and smooths the correction, by the staleness of
            samples; None: the settings alone.
    """

    def __init__(
        self, context: RunContext, guard: DivergenceGuard, control: StalenessControl | None = None
    ) -> None:
        from skyasync.algorithms.kl import kl_controller
        from skyasync.algorithms.objective import Objective

        cfg = context.cfg
        self.objective = Objective(cfg.trainer.algorithm)
        self.kl_controller = kl_controller(cfg.trainer.algorithm)
        self.groups: list[Group] = []
        self.updates = 0
        self.parts: list[UpdateBatch] = []
        self.trained: list[UpdateBatch] = []
        self._context = context
        self._cfg = cfg.trainer
        self.guard = guard
        self.control = control
        self._plan = ScoringPlan.of(cfg, self.objective)
        own_critic = self._plan.values and not self._plan.values_by_policy
        self._at_once = own_critic and not ROLES[CRITIC_ROLE].colocated_if(
            cfg
        )  # the critic has devices of its own
        self._update_metrics: dict[
            str, list[float]
        ] = {}  # by each optimizer step of this training step
        self._computed = (
            False  # the batch's log-probabilities by the policy before its first update
        )
        self._denominator = 0.0  # of the loss, if the parts' weights lack it
        self._lr_scale: float | None = (
            None  # of this training step; None before its first optimizer step
        )

    # ---------------------------------------------------------------- prepare

    async def scored(self, sampled: RolloutBatch) -> ScoredBatch:
        """Add the tensors of the ``ScoringPlan``.

        After an update of the same step the proximal policy is gone: the engines' log-probabilities
        take their place.
        """
        from skyasync.models.batch import ScoredBatch

        batch = sampled.to_stage(ScoredBatch)
        plan = self._plan
        algorithm = self._cfg.algorithm
        dispatch = self._context.dispatch
        timed = self._context.phases.timed
        if plan.experts:
            check_experts(batch)
        if plan.behaviour and batch.behaviour_logprobs[batch.loss_mask].isnan().any():
            raise UserError(
                f"the generator's output lacks rollout_logprobs, but trainer.algorithm.policy_loss_type="
                f"{algorithm.policy_loss_type} with trainer.algorithm.off_policy_correction="
                f"{algorithm.off_policy_correction} uses the behaviour policy: return them, or choose "
                f"trainer.algorithm.off_policy_correction=none"
            )
        if plan.reference:
            with timed("reference"):
                batch.reference_logprobs = await dispatch.ask(REFERENCE, "logprobs", batch)
        proximal = plan.needs_proximal(
            self._context.length.updates_per_batch(len(batch.group_ids.unique()))
        )
        computed = proximal and not self.updates
        in_one_pass = computed and plan.values_by_policy
        if plan.values:
            with timed("values"):
                if in_one_pass:
                    both = await dispatch.ask(POLICY, "logprobs_and_values", batch)
                    batch.proximal_logprobs, batch.values = both.unbind(-1)
                else:
                    batch.values = await dispatch.ask(CRITIC_ROLE, "values", batch)
        if plan.teacher:
            with timed("teacher"):
                answer = await dispatch.ask(TEACHER_ROLE, plan.teacher, batch)
            if plan.teacher == "logprobs":
                batch.teacher_logprobs = answer
            else:
                batch.teacher_top_k = answer
        if proximal:
            self._computed = computed
        if proximal and not computed:
            batch.proximal_logprobs = batch.behaviour_logprobs
        elif computed and not in_one_pass:
            with timed("logprobs"):
                batch.proximal_logprobs = await dispatch.ask(POLICY, "logprobs", batch)
        return batch

    # ---------------------------------------------------------------- update

    async def forward_backward(self, part: TrainingBatch, *, complete: bool = True) -> None:
        """Add the gradient of some rows (whole trajectories) of a prepared batch.

        Args:
            complete: the part is its whole mini-batch, so its loss weights are final. If not, the
                next optimizer step divides by the denominator that all parts before it have
                together, and the gradient is the same.
        """
        import torch

        from skyasync.algorithms.reductions import loss_numerators, loss_weights
        from skyasync.models.batch import UpdateBatch

        algorithm = self._cfg.algorithm
        ids = part.trajectory_ids
        if complete:
            weights = loss_weights(algorithm, part.loss_mask, part.group_ids, trajectory_ids=ids)
            with torch.random.fork_rng(devices=[]):  # what a loss draws, a resumed run draws again
                torch.manual_seed(hash((self._cfg.seed, self._context.progress.step, self.updates)))
                selection = self.objective.prepare(part).get("selection")
            batch = part.to_stage(UpdateBatch, loss_weights=weights, selection=selection)
        else:
            weights, denominator = loss_numerators(algorithm, part.loss_mask, part.group_ids, ids)
            self._denominator += denominator
            batch = part.to_stage(UpdateBatch, loss_weights=weights)
        if self.control:
            batch.correction_exponent = self.control.exponent
        else:
            batch.correction_exponent = 1.0
        if (
            self.updates and not self._frozen
        ):  # in the first update the current policy is the proximal one
            if algorithm.proximal_logprobs != "recompute":
                batch.approximated_version = self._context.progress.step + 1
            elif not complete and batch.proximal_logprobs is None:
                batch.proximal_logprobs = batch.behaviour_logprobs
        if self._plan.values and batch.returns is None:
            raise UserError(
                "compute_advantages_and_returns must set batch.returns, which the critic learns"
            )
        for roles in self._trained_roles:
            async with together() as calls:
                for role in roles:
                    calls.start(self._context.dispatch.forward_backward(batch, role))
        part.proximal_logprobs = batch.proximal_logprobs  # for another epoch on it
        self.parts.append(batch)

    @property
    def _frozen(self) -> bool:
        """The policy is not trained yet: the critic learns first."""
        return self._plan.values and self._context.progress.step < self._cfg.critic.warmup_steps

    @property
    def _trained_roles(self) -> list[list[str]]:
        """The roles that are trained now: those of an inner list at once, the lists one after the
        other."""
        if self._plan.values_by_policy:
            return [[CRITIC_ROLE if self._frozen else POLICY]]
        roles = [*([] if self._frozen else [POLICY]), *([CRITIC_ROLE] if self._plan.values else [])]
        if self._at_once:
            return [roles]
        return [[role] for role in roles]

    async def optimizer_step(self) -> Metrics:
        """Change the weights by the gradient that ``forward_backward`` has added up.

        Gradients that are not finite are dropped: policy and critic both learn from a batch, or
        neither does.

        Returns:
            The policy's metrics, and the critic's as ``critic/...``.
        """
        scale = 1.0 / self._denominator if self._denominator else 1.0
        self._denominator = 0.0
        dispatch = self._context.dispatch
        problem = ""
        if self.guard.skips:
            roles = [role for turn in self._trained_roles for role in turn]
            problems = [
                self.guard.unfit,
                *[await dispatch.examine(scale, role=role) for role in roles],
            ]
            problem = next(filter(None, problems), "")
            if problem:
                for role in roles:
                    await dispatch.drop_gradient(role=role)
                self.guard.drop(problem)
        result: Metrics = {}
        if not problem:
            step = self._context.length.planned_updates + self.updates
            if self.control and self._lr_scale is None and not self._frozen:
                weights = [self.objective.correction_weights(part) for part in self.parts]
                known = [each for each in weights if each is not None]
                self._lr_scale = self.control.choose(self.parts, self._context.progress.step, known)
            changes: dict[str, Any] = {}  # of the policy's optimizer, in this step
            if self.control and self._lr_scale is not None:
                changes = {"lr_scale": self._lr_scale, "beta1": self.control.beta1}
            for roles in self._trained_roles:
                steps = {}
                async with together() as calls:
                    for role in roles:
                        options = changes if role == POLICY else {}
                        call = dispatch.optimizer_step(step, scale, role, **options)
                        steps[role] = calls.create_task(call)
                for role, done in steps.items():
                    for name, value in done.result().items():
                        if name.startswith(f"{CRITIC_ROLE}/"):
                            full = name
                        else:
                            full = f"{role}/{name}"
                        self._update_metrics.setdefault(full, []).append(value)
                        result[name if role == POLICY else f"{role}/{name}"] = value
            self.guard.count_update()
        self.updates += 1
        return result

    def finish(self, whole: TrainingBatch | None = None) -> Metrics:
        """The metrics of all updates of the training step, which is over.

        Args:
            whole: the batch that all parts were cut from, if they were.
        """
        metrics = {name: sum(values) / len(values) for name, values in self._update_metrics.items()}
        if self.parts:
            from skyasync.algorithms.values import value_metrics
            from skyasync.models.batch import UpdateBatch

            batch: TrainingBatch = self.parts[0]
            if whole is not None and self.updates > 1:
                batch = whole
            elif len(self.parts) > 1:
                batch = UpdateBatch.concatenate(self.parts)
            metrics |= self._drift_metrics(batch)
            if batch.values is not None and batch.returns is not None:
                critic = value_metrics(batch.values, batch.returns, batch.loss_mask)
                metrics |= {f"critic/{name}": value for name, value in critic.items()}
        self.trained = self.parts
        self._update_metrics = {}
        self.parts = []
        self.updates = 0
        self._computed = False
        if self.control and self._lr_scale is None:
            self.control.stand()
        self._lr_scale = None
        return metrics

    def _drift_metrics(self, batch: TrainingBatch) -> Metrics:
        """How far the policy that is trained is from the one that sampled, of a whole batch, also
        by staleness.

        The ``gap/...`` metrics compare two computations of the same weights. They are there only if
        the trainer's log-probabilities are of the version before the step, and computed, not taken
        from the engine.
        """
        from skyasync.algorithms.off_policy import gap_metrics, off_policy_metrics, stuck_ratio

        proximal = batch.proximal_logprobs
        behaviour = batch.behaviour_logprobs
        mask = batch.loss_mask
        if proximal is None or behaviour[mask].isnan().any():
            return {}
        step = self._context.progress.step
        staleness = step - batch.versions
        if "behaviour" in self.objective.needs:
            weights = self.objective.correction_weights(batch)
        else:
            weights = None
        metrics = off_policy_metrics(proximal, behaviour, mask, staleness, weights)
        if self.updates <= 1 or self._computed:
            metrics |= gap_metrics(proximal, behaviour, mask, staleness)
        problem = stuck_ratio(proximal, behaviour, mask, staleness)
        if problem:
            log.warning("step %d: %s", step + 1, problem)
            metrics["warnings/stuck_ratio"] = 1.0
        return metrics


def check_experts(batch: RolloutBatch) -> None:
    """Raises ``UserError`` unless the experts are known of every token that a loss token
    follows."""
    from skyasync.models.router_replay import unknown_expert

    experts = batch.routed_experts
    if experts is None:
        lacking = int(batch.loss_mask.sum())
    else:
        lacking = int(
            (
                batch.loss_mask[:, 1:] & (experts[:, :-1, 0, 0] == unknown_expert(experts.dtype))
            ).sum()
        )
    if lacking:
        raise UserError(
            f"trainer.policy.router_replay=R3 replays the experts that the engine chose, and of {lacking} generated "
            f"tokens they are not known: trajectories must be the generator's own, not made of lists; else set "
            f"trainer.policy.router_replay=none"
        )
