"""The tensor part of a step: from groups to one or more optimizer steps.

Invariant: everything that needs the whole batch (advantages, loss weights, selections) is computed here, before
workers see a part of it. The three policies are told apart by name: behaviour (sampled the tokens), proximal (before
the update), current (with gradient). A simulation replaces ``learn_from`` and nothing else.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skyasync.errors import UserError
from skyasync.rollout.types import Group
from skyasync.training.refill import Refill

if TYPE_CHECKING:  # torch is imported when training starts, so that a wrong setting is refused at once
    from torch import Tensor

    from skyasync.algorithms.objective import Objective
    from skyasync.workers.batch import TrainingBatch

log = logging.getLogger(__name__)


class Learning(Refill):
    """What ``RayPPOTrainer`` inherits: the hooks that change an algorithm, and the steps between them."""

    cfg: Any
    dispatch: Any
    objective: Objective
    kl_controller: Any

    def filter_groups(self, groups: list[Group]) -> list[Group]:
        """Choose which groups are trained: by default those that ``dynamic_sampling`` keeps."""
        from skyasync.algorithms.filters import group_filter

        algorithm = self.cfg.trainer.algorithm
        keep = group_filter(algorithm)
        return [group for group in groups if keep(group.judged_by(algorithm.dynamic_sampling.metric))]

    def _filtered(self, groups: list[Group]) -> list[Group]:
        kept = self.filter_groups(groups)
        if self.cfg.trainer.algorithm.dynamic_sampling.type != "none" or len(kept) < len(groups):
            self._metrics["dynamic_sampling/rejected"] = float(len(groups) - len(kept))
        return kept

    def drop_truncated(self, groups: list[Group]) -> list[Group]:
        """The groups without trajectories that did not end by themselves, if ``truncated_responses=drop``."""
        if self.cfg.trainer.algorithm.truncated_responses != "drop":
            return groups
        kept = [replace(g, trajectories=[t for t in g.trajectories if t.stop_reason == "stop"]) for g in groups]
        dropped = sum(len(group.trajectories) for group in groups) - sum(len(group.trajectories) for group in kept)
        self._metrics["response/dropped"] = float(dropped)
        return [group for group in kept if group.trajectories]

    def shape_rewards(self, batch: TrainingBatch) -> TrainingBatch:
        """Truncation, length penalty, scale, clip, normalisation; truncated responses leave the loss, if asked for."""
        from skyasync.algorithms.shaping import overlong_filter, shape_rewards

        assert batch.rewards is not None and batch.truncated is not None
        algorithm, before = self.cfg.trainer.algorithm, batch.rewards
        batch.rewards = shape_rewards(
            algorithm, before, batch.loss_mask, truncated=batch.truncated, group_ids=batch.group_ids,
            trajectory_ids=batch.trajectory_ids,
        )  # fmt: skip
        if batch.rewards is not before:
            rows = len(batch) if batch.trajectory_ids is None else len(batch.trajectory_ids.unique())
            self._metrics["reward/shaped_mean"] = float(batch.rewards.sum()) / rows
        if algorithm.truncated_responses == "mask":
            batch.loss_mask = overlong_filter(batch.loss_mask, batch.truncated)
        return batch

    def apply_reward_kl_penalty(self, batch: TrainingBatch) -> TrainingBatch:
        """Subtract the KL penalty from the token rewards, if ``use_kl_in_reward``."""
        algorithm = self.cfg.trainer.algorithm
        if algorithm.use_kl_in_reward:
            from skyasync.algorithms.kl import penalize_rewards

            assert batch.rewards is not None and batch.proximal_logprobs is not None
            assert batch.reference_logprobs is not None
            batch.rewards, kl = penalize_rewards(
                batch.rewards, batch.proximal_logprobs, batch.reference_logprobs, batch.loss_mask,
                coef=self.kl_controller.value, estimator=algorithm.kl_estimator_type, bound=algorithm.kl_clamp,
            )  # fmt: skip
            self._metrics |= {"reward/kl": float(kl), "reward/kl_coef": self.kl_controller.value}
            self.kl_controller.update(float(kl), len(batch))
        return batch

    def compute_advantages_and_returns(self, batch: TrainingBatch) -> TrainingBatch:
        """Fill ``batch.advantages`` from ``batch.rewards``."""
        from skyasync.algorithms.advantages import compute_advantages

        assert batch.rewards is not None
        batch.advantages, _ = compute_advantages(
            self.cfg.trainer.algorithm, batch.rewards, batch.loss_mask, batch.group_ids,
            trajectory_ids=batch.trajectory_ids,
        )  # fmt: skip
        return batch

    async def learn_from(self, groups: list[Group]) -> None:
        """The tensor part of ``train_on``, which a simulation replaces."""
        from skyasync.rollout.collate import collate_in_turns

        batch = self.shape_rewards(await collate_in_turns(groups))
        batch = await self._with_logprobs(batch)
        batch = self.apply_reward_kl_penalty(batch)
        batch = self.compute_advantages_and_returns(batch)
        await self._update(batch)

    async def _with_logprobs(self, batch: TrainingBatch) -> TrainingBatch:
        """Add the log-probabilities that the objective needs and that an update does not give for free.

        With one update per batch the policy before the update is the proximal one, and the update has its
        log-probabilities anyway.
        """
        groups = len(batch.group_ids.unique())
        needs, early = self.objective.needs, self.objective.needs_before_update
        if "behaviour" in needs and batch.behaviour_logprobs is not None:
            self._check_behaviour(batch.behaviour_logprobs[batch.loss_mask])
        if "reference" in needs:
            with self.timed("reference", self._metrics):
                batch.reference_logprobs = await self.dispatch.reference_logprobs(batch)
        several = self.updates_per_batch(groups) > 1 and not self._approximates
        if "proximal" in early or ("proximal" in needs and several):
            with self.timed("logprobs", self._metrics):
                batch.proximal_logprobs = await self.dispatch.policy_logprobs(batch)
        return batch

    def _check_behaviour(self, logprobs: Tensor) -> None:
        algorithm = self.cfg.trainer.algorithm
        if logprobs.isnan().any():
            raise UserError(
                f"the generator's output lacks rollout_logprobs, but trainer.algorithm.policy_loss_type="
                f"{algorithm.policy_loss_type} with trainer.algorithm.off_policy_correction="
                f"{algorithm.off_policy_correction} uses the behaviour policy: return them, or choose "
                f"trainer.algorithm.off_policy_correction=none"
            )

    def updates_per_batch(self, groups: int) -> int:
        """Optimizer steps on a batch of so many groups."""
        trainer = self.cfg.trainer
        return trainer.update_epochs_per_batch * -(-groups // (trainer.policy_mini_batch_size or groups))

    @property
    def _approximates(self) -> bool:
        return self.cfg.trainer.algorithm.proximal_logprobs != "recompute"

    def _planned_updates(self) -> int:
        """Optimizer steps before this training step as the learning rate counts them: those that groups left out
        would have made included, so that the schedule ends with the run."""
        updates = self.updates_per_batch(self.cfg.trainer.train_batch_size)
        by_steps = self.global_step * updates
        if not self.refilling:
            return by_steps
        steps, most = self.prompts.steps(), self.cfg.trainer.max_training_steps
        total = min(steps, most or steps) * updates
        return max(by_steps, (self.position + len(self.ahead)) * total // self.prompts.total)

    async def _update(self, batch: TrainingBatch) -> None:
        from skyasync.algorithms.objective import loss_weights
        from skyasync.workers.batch import mini_batches

        trainer = self.cfg.trainer
        seen: dict[str, list[float]] = {}
        update = planned = self._planned_updates()
        with self.timed("update", self._metrics):
            for _ in range(trainer.update_epochs_per_batch):
                for part in mini_batches(batch, trainer.policy_mini_batch_size):
                    part.loss_weights = loss_weights(
                        trainer.algorithm, part.loss_mask, part.group_ids, trajectory_ids=part.trajectory_ids
                    )
                    part.selection = self.objective.prepare(part).get("selection")
                    part.schedule_step = update
                    if self._approximates and update > planned:  # in the first one the current policy is the proximal
                        part.approximated_version = self.global_step + 1
                    update += 1
                    for name, value in (await self.dispatch.update_policy(part)).items():
                        seen.setdefault(name, []).append(value)
        self._metrics |= {f"policy/{name}": sum(values) / len(values) for name, values in seen.items()}
        only_update = part if len(seen["loss"]) == 1 else batch
        self._observe_staleness(only_update)

    def _observe_staleness(self, batch: TrainingBatch) -> None:
        """How far the proximal policy is from the one that sampled, also by staleness."""
        from skyasync.algorithms.off_policy import off_policy_metrics, stuck_ratio

        proximal, behaviour, mask = batch.proximal_logprobs, batch.behaviour_logprobs, batch.loss_mask
        if proximal is None or behaviour is None or batch.versions is None or behaviour[mask].isnan().any():
            return
        staleness = self.global_step - batch.versions
        weights = self.objective.correction_weights(batch) if "behaviour" in self.objective.needs else None
        self._metrics |= off_policy_metrics(proximal, behaviour, mask, staleness, weights)
        if problem := stuck_ratio(proximal, behaviour, mask, staleness):
            log.warning("step %d: %s", self.global_step + 1, problem)
            self._metrics["warnings/stuck_ratio"] = 1.0
