"""Supervised fine-tuning: cross-entropy of demonstrations, by the same workers as RL.

Invariant: with ``trainer.algorithm.loss_reduction=token_mean`` the loss of an update is the mean of
-log p over all response tokens of its mini-batch, however it is packed or divided among ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from skyasync.data.demonstrations import Demonstration
from skyasync.rollout.types import Group, Prompt, Rollout, Segment, Trajectory, TrajectoryId
from skyasync.trainer.context import Metrics
from skyasync.trainer.extensions import notify
from skyasync.trainer.trainer import RayPPOTrainer
from skyasync.workers.roles import POLICY

if TYPE_CHECKING:  # torch is imported when training starts: settings are checked without it
    from skyasync.models.batch import ScoredBatch

OBJECTIVE = {"policy_loss_type": "vanilla", "off_policy_correction": "none"}
"""Settings of ``trainer.algorithm``: with advantages of 1 the gradient is that of -log p."""


class SupervisedTrainer(RayPPOTrainer):
    """Trains on demonstrations; nothing is generated, and no weights are sent.

    | who waits | for what   | woken by    |
    |-----------|------------|-------------|
    | ``train`` | the update | the workers |
    """

    async def train(self) -> None:
        for prompts in self.remaining_prompts():
            # As if the current policy had written the responses.
            groups = groups_of(prompts.prompts, self.global_step)
            status = await self.train_on(Rollout(groups, prompts.positions))
            if "policy/loss" in status:
                status["sft/loss"] = status["policy/loss"]
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)

    def compute_advantages_and_returns(self, batch: ScoredBatch) -> ScoredBatch:
        from skyasync.models.batch import TrainingBatch

        return batch.to_stage(TrainingBatch, advantages=batch.rewards.new_ones(batch.rewards.shape))

    async def evaluate(self) -> Metrics:
        """The loss of the held-out demonstrations, in nats per response token."""
        from skyasync.rollout.collate import collate

        metrics: Metrics = {}
        if not self.eval_dataset:
            return metrics
        size = self.cfg.trainer.eval_batch_size
        total = 0.0
        tokens = 0
        self.context.phases.name = "evaluating"
        with self.timed("eval", metrics, "evaluation"):
            for start in range(0, len(self.eval_dataset), size):
                groups = groups_of(self.eval_dataset[start : start + size], self.global_step)
                batch = await asyncio.to_thread(collate, groups)
                async with self.context.phases.limited("evaluation"):
                    logprobs = await self.dispatch.ask(POLICY, "logprobs", batch)
                # In float64: the sum is over all tokens of the data.
                total -= float(logprobs[batch.loss_mask].double().sum())
                tokens += int(batch.loss_mask.sum())
        metrics |= {"eval/loss": total / tokens, "eval/version": float(self.policy_version)}
        await notify(self, "on_evaluate", metrics)
        return metrics


def groups_of(demonstrations: Sequence[Prompt], version: int) -> list[Group]:
    """A group of one trajectory for every demonstration.

    No behaviour policy is known: its log-probabilities are NaN.
    """
    groups = []
    for demonstration in cast(Sequence[Demonstration], demonstrations):
        sequences = [_with_version(segments, version) for segments in demonstration.sequences]
        *branches, segments = sequences
        trajectory = Trajectory(TrajectoryId(demonstration.id, 0), segments, branches=branches)
        prompt = replace(demonstration, messages=demonstration.messages[:-1])
        groups.append(Group(prompt, [trajectory]))
    return groups


def _with_version(segments: Sequence[Segment], version: int) -> list[Segment]:
    return [
        replace(segment, versions=np.full_like(segment.versions, version)) for segment in segments
    ]
