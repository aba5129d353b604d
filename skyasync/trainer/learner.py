"""The tensor part of a step: from a batch to one or more optimizer steps.

Invariant: all that needs the complete batch (advantages, loss weights, selections) is computed
before workers see a part of it. Three policies have names: behaviour (sampled the tokens), proximal
(before the update), current (with gradient).

    batch ──scored──▶ ScoredBatch ──hooks──▶ TrainingBatch
    TrainingBatch ──forward_backward, part by part──▶ gradient ──optimizer_step──▶ newer policy
    all updates of the step ──finish──▶ metrics
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

if TYPE_CHECKING:  # torch is imported when training starts: settings are checked without it
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

    experts: bool  # must be in the batch: they are replayed
    behaviour: bool  # log-probabilities must be in the batch
    reference: bool
    teacher: Literal["", "logprobs", "top_logprobs"]
    values: bool
    values_by_policy: bool  # by a head on its layers
    proximal: Literal["never", "several updates", "always"]

    @classmethod
    def of(cls, cfg: Config, objective: Objective) -> ScoringPlan:
        trainer = cfg.trainer
        critic = ROLES[CRITIC_ROLE]
        teacher: Literal["", "logprobs", "top_logprobs"] = ""
        if ROLES[TEACHER_ROLE].has_ranks(cfg):
            teacher = "top_logprobs" if trainer.teacher.top_k else "logprobs"
        proximal: Literal["never", "several updates", "always"] = "never"
        # A teacher's log-probabilities are compared with the policy's before the update.
        if teacher == "logprobs" or "proximal" in objective.needs_before_update:
            proximal = "always"
        elif "proximal" in objective.needs and trainer.algorithm.proximal_logprobs == "recompute":
            proximal = "several updates"
        return cls(
            experts=trainer.policy.router_replay != "none",
            behaviour="behaviour" in objective.needs,
            reference="reference" in objective.needs,
            teacher=teacher,
            values=critic.enabled_if(cfg),
            values_by_policy=critic.enabled_if(cfg) and critic.hosted_by_policy(cfg),
            proximal=proximal,
        )

    def needs_proximal(self, updates: int) -> bool:
        """Whether proximal log-probabilities are computed for a batch of so many updates."""
        return self.proximal == "always" or (self.proximal == "several updates" and updates > 1)


class Learner:
    """Trains the policy and the critic, one training step at a time.

    Attributes:
        groups: prepared since the end of the previous step; also replayed ones.
        updates: optimizer steps of the current training step, also those that were left out.
        update_batches: batches of the current training step whose gradient was computed.
        trained_batches: ``update_batches`` of the previous training step.
        guard: decides about updates and rewards that are not finite.
        control: chooses the policy's step size, and smooths the correction, by the staleness of
            samples; None: by the settings alone.
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
        self.update_batches: list[UpdateBatch] = []
        self.trained_batches: list[UpdateBatch] = []
        self._context = context
        self._cfg = cfg.trainer
        self.guard = guard
        self.control = control
        self._plan = ScoringPlan.of(cfg, self.objective)
        separate_critic = self._plan.values and not self._plan.values_by_policy
        # A critic with separate devices is trained at the same time as the policy.
        self._at_once = separate_critic and not ROLES[CRITIC_ROLE].colocated_if(cfg)
        # Metric -> its value in each optimizer step of this training step.
        self._update_metrics: dict[str, list[float]] = {}
        # The batch has log-probabilities by the policy before the step's first update.
        self._has_logprobs = False
        self._denominator = 0.0  # of the loss, if the loss weights lack it
        # Of this training step; None before its first optimizer step.
        self._lr_scale: float | None = None

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
        groups = len(batch.group_ids.unique())
        needs_proximal = plan.needs_proximal(self._context.length.updates_per_batch(groups))
        before_updates = needs_proximal and self.updates == 0
        in_one_pass = before_updates and plan.values_by_policy
        if plan.values:
            with timed("values"):
                if in_one_pass:
                    outputs = await dispatch.ask(POLICY, "logprobs_and_values", batch)
                    # [batch, length, 2] -> twice [batch, length]
                    batch.proximal_logprobs, batch.values = outputs.unbind(-1)
                else:
                    batch.values = await dispatch.ask(CRITIC_ROLE, "values", batch)
        if plan.teacher:
            with timed("teacher"):
                outputs = await dispatch.ask(TEACHER_ROLE, plan.teacher, batch)
            if plan.teacher == "logprobs":
                batch.teacher_logprobs = outputs  # [batch, length]
            else:
                batch.teacher_top_k = outputs  # [batch, length, 2 k]
        if needs_proximal:
            self._has_logprobs = before_updates
            if not before_updates:
                batch.proximal_logprobs = batch.behaviour_logprobs
            elif not in_one_pass:
                with timed("logprobs"):
                    batch.proximal_logprobs = await dispatch.ask(POLICY, "logprobs", batch)
        return batch

    # ---------------------------------------------------------------- update

    async def forward_backward(self, part: TrainingBatch, *, complete: bool = True) -> None:
        """Add the gradient of some rows (whole trajectories) of a prepared batch.

        Args:
            complete: the part is a complete mini-batch, so its loss weights are final. If not, the
                next optimizer step divides by the denominator of all parts, and the gradient is the
                same.
        """
        import torch

        from skyasync.algorithms.reductions import loss_numerators, loss_weights
        from skyasync.models.batch import UpdateBatch

        algorithm = self._cfg.algorithm
        ids = part.trajectory_ids
        step = self._context.progress.step
        if complete:
            weights = loss_weights(algorithm, part.loss_mask, part.group_ids, trajectory_ids=ids)
            # By the step's number, so that a resumed run draws the same random numbers.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(hash((self._cfg.seed, step, self.updates)))
                selection = self.objective.prepare(part).get("selection")
            batch = part.to_stage(UpdateBatch, loss_weights=weights, selection=selection)
        else:
            weights, denominator = loss_numerators(algorithm, part.loss_mask, part.group_ids, ids)
            self._denominator += denominator
            batch = part.to_stage(UpdateBatch, loss_weights=weights)
        batch.correction_exponent = self.control.exponent if self.control else 1.0
        # In the first update the current policy is the proximal one.
        if self.updates and not self._policy_is_frozen:
            if algorithm.proximal_logprobs != "recompute":
                batch.approximated_version = step + 1
            elif not complete and batch.proximal_logprobs is None:
                batch.proximal_logprobs = batch.behaviour_logprobs
        if self._plan.values and batch.returns is None:
            raise UserError(
                "compute_advantages_and_returns must set batch.returns, which the critic learns"
            )
        for roles in self._role_turns:
            async with together() as calls:
                for role in roles:
                    calls.start(self._context.dispatch.forward_backward(batch, role))
        # The policy has filled them in, if they were missing; the next epoch needs them.
        part.proximal_logprobs = batch.proximal_logprobs
        self.update_batches.append(batch)

    @property
    def _policy_is_frozen(self) -> bool:
        """The policy is not trained yet: the critic learns first."""
        return self._plan.values and self._context.progress.step < self._cfg.critic.warmup_steps

    @property
    def _role_turns(self) -> list[list[str]]:
        """The roles that are trained now: those of a list at once, one list after the other."""
        if self._plan.values_by_policy:
            # One backward pass trains both, or the critic's head alone.
            return [[CRITIC_ROLE if self._policy_is_frozen else POLICY]]
        roles = []
        if not self._policy_is_frozen:
            roles.append(POLICY)
        if self._plan.values:
            roles.append(CRITIC_ROLE)
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
        metrics: Metrics = {}
        if not await self._gradient_dropped(scale):
            metrics = await self._update_weights(scale)
            self.guard.count_update()
        self.updates += 1
        return metrics

    async def _gradient_dropped(self, scale: float) -> bool:
        """Drop the gradient if ``trainer.on_nonfinite=skip`` and something in it is not finite."""
        if not self.guard.skips:
            return False
        dispatch = self._context.dispatch
        problem = self.guard.unfit
        for roles in self._role_turns:
            for role in roles:
                # Every role is examined: all its ranks take part in the call.
                role_problem = await dispatch.examine(scale, role=role)
                problem = problem or role_problem
        if not problem:
            return False
        for roles in self._role_turns:
            for role in roles:
                await dispatch.drop_gradient(role=role)
        self.guard.drop(problem)
        return True

    async def _update_weights(self, scale: float) -> Metrics:
        """An optimizer step of every role that is trained now."""
        schedule_step = self._context.length.planned_updates + self.updates
        policy_options = self._policy_optimizer_options()
        result: Metrics = {}
        for roles in self._role_turns:
            role_calls = {}
            async with together() as calls:
                for role in roles:
                    options = policy_options if role == POLICY else {}
                    call = self._context.dispatch.optimizer_step(
                        schedule_step, scale, role, **options
                    )
                    role_calls[role] = calls.create_task(call)
            for role, finished_call in role_calls.items():
                for name, value in finished_call.result().items():
                    result[name if role == POLICY else f"{role}/{name}"] = value
                    # A critic on the policy's layers has its metrics among the policy's.
                    if name.startswith(f"{CRITIC_ROLE}/"):
                        metric = name
                    else:
                        metric = f"{role}/{name}"
                    self._update_metrics.setdefault(metric, []).append(value)
        return result

    def _policy_optimizer_options(self) -> dict[str, Any]:
        """Learning rate factor and beta1 of this training step, by the staleness of its samples.

        They are chosen at the first optimizer step.
        """
        if self.control is None:
            return {}
        if self._lr_scale is None and not self._policy_is_frozen:
            correction_weights = []
            for batch in self.update_batches:
                weights = self.objective.correction_weights(batch)
                if weights is not None:
                    correction_weights.append(weights)
            self._lr_scale = self.control.choose(
                self.update_batches, self._context.progress.step, correction_weights
            )
        if self._lr_scale is None:
            return {}
        return {"lr_scale": self._lr_scale, "beta1": self.control.beta1}

    def finish(self, prepared: TrainingBatch | None = None) -> Metrics:
        """End the training step.

        Args:
            prepared: the batch that all update batches were cut from, if there was one.

        Returns:
            The metrics of all updates: their mean, and those of the step's batch.
        """
        metrics = {name: sum(values) / len(values) for name, values in self._update_metrics.items()}
        update_batches = self.update_batches
        if update_batches:
            from skyasync.algorithms.values import value_metrics
            from skyasync.models.batch import UpdateBatch

            batch: TrainingBatch = update_batches[0]
            if prepared is not None and self.updates > 1:
                batch = prepared  # each row once, although epochs train it several times
            elif len(update_batches) > 1:
                batch = UpdateBatch.concatenate(update_batches)
            metrics |= self._drift_metrics(batch)
            if batch.values is not None and batch.returns is not None:
                critic = value_metrics(batch.values, batch.returns, batch.loss_mask)
                for name, value in critic.items():
                    metrics[f"critic/{name}"] = value
        self.trained_batches = update_batches
        self._update_metrics = {}
        self.update_batches = []
        self.updates = 0
        self._has_logprobs = False
        if self.control and self._lr_scale is None:
            self.control.record_skipped_step()
        self._lr_scale = None
        return metrics

    def _drift_metrics(self, batch: TrainingBatch) -> Metrics:
        """Distance of the trained policy from the one that sampled, of a batch and by staleness.

        The ``gap/...`` metrics compare two computations of the same weights. They need
        log-probabilities of the version before the step that the trainer computed itself.
        """
        from skyasync.algorithms.off_policy import gap_metrics, off_policy_metrics, stuck_ratio

        proximal = batch.proximal_logprobs
        behaviour = batch.behaviour_logprobs
        mask = batch.loss_mask
        if proximal is None or behaviour[mask].isnan().any():
            return {}
        step = self._context.progress.step
        staleness = step - batch.versions
        weights = None
        if "behaviour" in self.objective.needs:
            weights = self.objective.correction_weights(batch)
        metrics = off_policy_metrics(proximal, behaviour, mask, staleness, weights)
        if self.updates <= 1 or self._has_logprobs:
            metrics |= gap_metrics(proximal, behaviour, mask, staleness)
        problem = stuck_ratio(proximal, behaviour, mask, staleness)
        if problem:
            log.warning("step %d: %s", step + 1, problem)
            metrics["warnings/stuck_ratio"] = 1.0
        return metrics


def check_experts(batch: RolloutBatch) -> None:
    """Raise ``UserError`` if a token that a loss token follows has no experts in the batch."""
    from skyasync.models.router_replay import unknown_expert

    experts = batch.routed_experts  # [batch, length, layers, experts per token]
    missing_tokens = batch.loss_mask
    if experts is not None:
        # A token without experts has none in any layer. [batch, length - 1]
        is_unknown = experts[:, :-1, 0, 0] == unknown_expert(experts.dtype)
        missing_tokens = batch.loss_mask[:, 1:] & is_unknown
    missing = int(missing_tokens.sum())
    if missing:
        raise UserError(
            f"trainer.policy.router_replay=R3 replays the experts that the engine chose, and of {missing} generated "
            f"tokens they are not known: trajectories must be the generator's own, not made of lists; else set "
            f"trainer.policy.router_replay=none"
        )
