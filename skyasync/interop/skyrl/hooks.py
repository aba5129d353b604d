"""SkyRL's hooks, callbacks and names on any plan of ours: ``class Mine(SkyRLNames, AsyncRayPPOTrainer)``.

Invariant: a hook that a subclass defines is called in SkyRL's form; any other hook is ours and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from skyasync.callbacks import RunExtension
from skyasync.envs.registry import Foreign
from skyasync.interop.skyrl.batch import TrainingInputBatch, as_groups, as_output
from skyasync.interop.skyrl.callbacks import CallbackHandler, TrainingCallback, check_events
from skyasync.interop.skyrl.gym import numbers
from skyasync.interop.skyrl.shims import LoggedTracker, SettingsView, TrainDataLoader
from skyasync.models.batch import TokenBatch
from skyasync.rollout.types import Group
from skyasync.trainer.context import Metrics

if TYPE_CHECKING:
    from skyasync.trainer import RayPPOTrainer as _Base
else:
    _Base = object

HOOKS = ("postprocess_generator_output", "apply_reward_kl_penalty", "compute_advantages_and_returns")


class Postprocessed(tuple[Foreign, list[str]]):
    """The output and its uids; loops of 2025, which know no uids, read it as the output alone."""

    def __getitem__(self, name: Foreign) -> Foreign:
        return self[0][name] if isinstance(name, str) else super().__getitem__(name)


class SkyRLNames(_Base):
    """Inherit it in front of a plan."""

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        for name in HOOKS:
            if name in vars(cls) and cls.__module__.partition(".")[0] != "skyasync":
                setattr(cls, name, _for_both_callers(vars(cls)[name], name))

    def __init__(self, *args: Foreign, callbacks: Sequence[object] | None = None, **parts: Foreign) -> None:
        ours = [callback for callback in callbacks or () if isinstance(callback, RunExtension)]
        theirs: list[Any] = [callback for callback in callbacks or () if not isinstance(callback, RunExtension)]
        self._their_step: int | None = None
        super().__init__(*args, **parts, callbacks=ours)  # type: ignore[misc]
        self.train_dataset: Foreign = parts.get("train_dataset") or args[3]
        self.all_metrics: dict[str, Any] = {}
        self.all_timings: dict[str, float] = {}
        trainer = self.cfg.trainer
        if not trainer.epochs:  # SkyRL's loops count epochs: as many as the steps take
            epochs = -(-trainer.max_training_steps // max(1, len(self.train_dataset) // trainer.train_batch_size))
            self.cfg = replace(self.cfg, trainer=replace(trainer, epochs=max(1, epochs)))
        self.train_dataloader = TrainDataLoader(self.cfg, self.train_dataset, self.context.progress)
        self.steps_per_epoch = len(self.train_dataloader)
        self.callback_handler = CallbackHandler(theirs)
        self._tracker = LoggedTracker(
            self.context.tracker, lambda logs: self.callback_handler.fire("on_log", self, logs=logs)
        )
        self.extensions.append(self.callback_handler)
        self.context.tracker = self._tracker
        self.colocate_all = bool(trainer.placement.colocate_all)
        self.cfg: Foreign = SettingsView(self.cfg)
        self._groups: list[Group] = []  # of the current batch, row by row

    # ---------------------------------------------------------------- names

    @property
    def global_step(self) -> int:
        """Steps done; a loop of SkyRL's counts by itself."""
        return self.context.progress.step if self._their_step is None else self._their_step

    @global_step.setter
    def global_step(self, value: int) -> None:
        self._their_step = value

    @property
    def total_training_steps(self) -> int:
        most = self.cfg.trainer.max_training_steps
        steps = self.steps_per_epoch * self.cfg.trainer.epochs
        return min(steps, most) if most else steps

    def add_callback(self, callback: TrainingCallback) -> None:
        check_events(callback)
        self.callback_handler.callbacks.append(callback)

    # ---------------------------------------------------------------- hooks in SkyRL's form

    def postprocess_generator_output(
        self, generator_output: Foreign, uids: Sequence[str] | None = None, *more: object
    ) -> Foreign:
        """Rewards per token, and their means as metrics: what ``super()`` does for a hook of theirs."""
        if uids is None:
            return generator_output  # groups
        rewards, responses = generator_output["rewards"], generator_output["response_ids"]
        sums = [sum(r) if isinstance(r, list) else float(r) for r in rewards]
        best: dict[str, float] = {}
        for uid, reward in zip(uids, sums, strict=True):
            best[uid] = max(best.get(uid, reward), reward)
        count = self.cfg.generator.n_samples_per_prompt
        self.all_metrics |= {
            f"reward/avg_pass_at_{count}": sum(value > 0 for value in best.values()) / max(len(best), 1),
            "reward/avg_raw_reward": sum(sums) / max(len(sums), 1),
            "reward/mean_positive_reward": sum(max(value, 0.0) for value in sums) / max(len(sums), 1),
        }
        generator_output["rewards"] = [
            list(reward) if isinstance(reward, list) else [0.0] * (len(response) - 1) + [float(reward)][: len(response)]
            for reward, response in zip(rewards, responses, strict=True)
        ]
        return Postprocessed((generator_output, list(uids)))

    def apply_reward_kl_penalty(self, data: Foreign) -> Foreign:
        if isinstance(data, TokenBatch):
            return super().apply_reward_kl_penalty(data)  # type: ignore[arg-type]
        data.batch = super().apply_reward_kl_penalty(data.batch)
        return data

    def compute_advantages_and_returns(self, data: Foreign) -> Foreign:
        if isinstance(data, TokenBatch):
            return super().compute_advantages_and_returns(data)  # type: ignore[arg-type]
        batch: Foreign = super().compute_advantages_and_returns(data.batch)
        batch.returns = batch.advantages if batch.returns is None else batch.returns  # the critic's, if there is one
        data.batch = batch
        advantages = batch.advantages[batch.loss_mask]
        self.all_metrics |= {
            "loss/avg_final_rewards": float(batch.rewards.sum()) / max(len(batch), 1),
            "loss/avg_raw_advantages": float(advantages.mean()) if len(advantages) else 0.0,
            "loss/avg_raw_advantages_abs": float(advantages.abs().mean()) if len(advantages) else 0.0,
        }
        return data

    # ---------------------------------------------------------------- what our steps call

    def drop_truncated(self, groups: list[Group]) -> list[Group]:
        self._groups = super().drop_truncated(groups)
        return self._groups

    async def end_step(self, status: Metrics) -> None:
        self.metrics.update(numbers(self.all_metrics) | {f"timing/{n}": s for n, s in self.all_timings.items()})
        self.all_metrics, self.all_timings = {}, {}
        await super().end_step(status)
        await self._settle()
        control = self.callback_handler.control
        if control.should_save and self.checkpointer.saved_step < self.context.progress.step:
            await self.save_checkpoint()
        if control.should_evaluate:
            self._tracker.add(await self.evaluate(), self.context.progress.step)
        control.reset()
        self.callback_handler.begin_step(self)
        await self._settle()

    async def evaluate(self) -> Metrics:
        if self.eval_dataset:
            self.callback_handler.fire("on_eval_start", self)
        metrics = await super().evaluate()
        await self._settle()
        return metrics

    async def _begin(self) -> None:
        await super()._begin()
        await self._settle()

    async def _close(self) -> None:
        await self._settle()
        await super()._close()

    async def _settle(self) -> None:
        """Await callbacks that are ``async def``; what they add to a log is logged."""
        for event in await self.callback_handler.settle():
            if event.logs is not None:
                self._tracker.add(event.logs, event.global_step)

    def _view(self, batch: TokenBatch) -> TrainingInputBatch:
        sequences = [(g, q) for g in self._groups for t in g.trajectories for q in t.sequences]
        lengths = torch.tensor([len(sequence[0].tokens) for _, sequence in sequences], dtype=torch.long)
        return TrainingInputBatch(batch, lengths, [str(group.prompt.id) for group, _ in sequences])


def _for_both_callers(theirs: Callable[..., Foreign], name: str) -> Callable[..., Foreign]:
    """A hook of theirs that can also be called as our steps do: with groups or a batch of ours alone."""

    def hook(self: SkyRLNames, first: Foreign, *more: Foreign, **named: Foreign) -> Foreign:
        if more or named or not isinstance(first, TokenBatch | list):
            return theirs(self, first, *more, **named)
        if isinstance(first, list):
            if not first:
                return first
            output, uids = theirs(self, *as_output(first))
            return as_groups(output, uids, {str(group.prompt.id): group.prompt for group in first}, self.policy_version)
        changed: TrainingInputBatch = theirs(self, self._view(first))
        return changed.as_training() if name == "compute_advantages_and_returns" else changed.batch

    hook.__doc__, hook.__name__ = theirs.__doc__, name
    return hook
