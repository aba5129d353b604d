"""SkyRL's hooks, callbacks and names on any plan of ours: ``class Mine(SkyRLNames, AsyncRayPPOTrainer)``.

Callbacks get three arguments for every event, and flags that ask for a save or an evaluation.

Invariant: a hook that a subclass defines is called in SkyRL's form; any other hook is ours and costs nothing. An event
is over when every callback has returned, also one that is ``async def``; an exception ends the run.
Source: ``skyrl/train/utils/callbacks.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from skyasync.callbacks import RunExtension, Watched
from skyasync.envs import Foreign
from skyasync.errors import UserError, unknown
from skyasync.interop.skyrl.batch import TrainingInputBatch, as_groups, as_output
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
EVENTS = ("on_train_start", "on_train_end", "on_epoch_start", "on_epoch_end", "on_step_start", "on_step_end",
          "on_eval_start", "on_eval_end", "on_save", "on_log")  # fmt: skip


@dataclass
class CallbackInput:
    """What an event is about; fields that have no part in it are None."""

    global_step: int
    epoch: int
    total_steps: int
    steps_per_epoch: int
    batch: Foreign = None
    metrics: dict[str, Any] | None = None
    logs: dict[str, Any] | None = None
    ckpt_path: str | None = None


@dataclass
class TrainingControl:
    """Set in ``on_step_end``: the step then ends with a checkpoint or an evaluation."""

    should_save: bool = False
    should_evaluate: bool = False

    def reset(self) -> None:
        self.should_save = self.should_evaluate = False


class TrainingCallback:
    """Override the events that you care about, ``def`` or ``async def``."""


for _event in EVENTS:
    setattr(TrainingCallback, _event, lambda self, trainer, callback_input, control: None)


class CallbackHandler(RunExtension):
    """Passes the events of our trainer to SkyRL's callbacks."""

    def __init__(self, callbacks: Sequence[TrainingCallback]) -> None:
        self.callbacks, self.control = list(callbacks), TrainingControl()
        self._unawaited: list[tuple[Awaitable[object], CallbackInput]] = []
        for callback in callbacks:
            check_events(callback)

    # Events of our trainer.

    def on_start(self, trainer: Watched) -> None:
        self.control.reset()
        self.fire("on_train_start", trainer)
        self.begin_step(trainer)

    def on_step_end(self, trainer: Watched, metrics: dict[str, float]) -> None:
        event_input = self.fire("on_step_end", trainer, metrics=metrics)
        if trainer.global_step % event_input.steps_per_epoch == 0:
            self.fire("on_epoch_end", trainer)

    def on_evaluate(self, trainer: Watched, metrics: dict[str, float]) -> None:
        self.fire("on_eval_end", trainer, metrics=metrics)

    def on_checkpoint(self, trainer: Watched, folder: Path) -> None:
        self.fire("on_save", trainer, ckpt_path=str(folder))

    def on_end(self, trainer: Watched) -> None:
        self.fire("on_train_end", trainer)

    # Events that ``SkyRLNames`` adds.

    def begin_step(self, trainer: Foreign) -> None:
        """The events before a step, if another one follows."""
        step = trainer.context.progress.step
        if step < trainer.total_steps:
            if step % trainer.steps_per_epoch == 0:
                self.fire("on_epoch_start", trainer)
            self.fire("on_step_start", trainer)

    def fire(self, event: str, trainer: Foreign, **more: Foreign) -> CallbackInput:
        """One event for all callbacks; what ``async def`` ones return is awaited by ``settle``."""
        per_epoch = trainer.steps_per_epoch
        step = trainer.context.progress.step + (event in ("on_step_start", "on_epoch_start"))
        event_input = CallbackInput(step, max(step - 1, 0) // per_epoch, trainer.total_steps, per_epoch, **more)
        for callback in self.callbacks:
            answer = methodcaller(event, trainer, event_input, self.control)(callback)
            if inspect.isawaitable(answer):
                self._unawaited.append((answer, event_input))
        return event_input

    async def settle(self) -> list[CallbackInput]:
        """Await what ``async def`` callbacks have returned; the events that it was about."""
        done = []
        while self._unawaited:
            awaitable, event_input = self._unawaited.pop(0)
            await awaitable
            done.append(event_input)
        return done


def check_events(callback: object) -> None:
    """Raises ``UserError`` for a method ``on_...`` that is no event, or an event that is missing."""
    names = dir(callback)
    for name in names:
        if name.startswith("on_") and name not in EVENTS:
            raise UserError(f"callback {type(callback).__name__}: {unknown('event', name, EVENTS)}")
    for name in EVENTS:
        if name not in names:
            raise UserError(f"callback {type(callback).__name__} has no {name}: subclass TrainingCallback")


# ---------------------------------------------------------------- the trainer


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
