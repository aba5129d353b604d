"""The steps that loops of SkyRL's are made of, so that a ``train()`` of its tutorials trains here.

    our plan   ──▶ hooks (output, uids) / (data["rewards"], ...), see ``hooks``
    their loop ──▶ generate ─▶ convert_to_training_input ─▶ fwd_logprobs_values_reward ─▶ apply_reward_kl_penalty
                   ─▶ compute_advantages_and_returns ─▶ train_critic_and_policy ─▶ dispatch.save_weights_for_sampler

| who waits                            | for what                       | woken by                                    |
|--------------------------------------|--------------------------------|---------------------------------------------|
| a step that is no ``async def``      | workers, files                 | a loop in another thread (``Loop``) |
| ``save_weights_for_sampler``         | the engines to take weights    | they do or fail; ``step_timeout_s``         |

Invariant: both ways train by the same code, ours; here names and forms change, and nothing is computed twice.
Source: SkyRL's tutorial on asynchronous training and the names in its ``trainer.py``.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from skyasync.config.resume import Resume
from skyasync.data.prompts import PromptBatch
from skyasync.envs.registry import Foreign
from skyasync.errors import UserError
from skyasync.interop.skyrl.batch import TrainingInputBatch, as_groups
from skyasync.interop.skyrl.generators import as_sampling
from skyasync.interop.skyrl.hooks import Postprocessed, SkyRLNames
from skyasync.interop.skyrl.shims import DispatchView, PolicyModel, ResumeMode, numbers
from skyasync.rollout.generator_api import sampling_params
from skyasync.rollout.types import GeneratorInput, Prompt, PromptId, Rollout, TrajectoryId
from skyasync.trainer import RayPPOTrainer as Ours
from skyasync.trainer.context import Metrics
from skyasync.utils.task_group import afterwards
from skyasync.workers.roles import CRITIC_ROLE, ROLES


class RayPPOTrainer(SkyRLNames, Ours):
    """Our synchronous plan with SkyRL's names; a subclass may bring a ``train`` of theirs."""

    ref_model = critic_model = None  # models are asked through the dispatch

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "train" in vars(cls):
            cls.train = _to_its_end(vars(cls)["train"])  # type: ignore[method-assign]

    def __init__(self, *args: Foreign, **parts: Foreign) -> None:
        super().__init__(*args, **parts)
        self._loop = Loop()
        self._rolling = 0  # requests of theirs that are with the generator
        self._begun = self._ran = False  # a train of theirs; our own beginning and end

    @property
    def dispatch(self) -> Foreign:
        return DispatchView(self.context.dispatch, self._sync)

    @property
    def policy_model(self) -> PolicyModel:
        return PolicyModel(self._sync)

    @property
    def has_critic(self) -> bool:
        return any(role.name == CRITIC_ROLE and role.enabled_if(self.cfg) for role in ROLES.values())

    @property
    def resume_mode(self) -> ResumeMode:
        return ResumeMode.LATEST if Resume.of(self.cfg.trainer).requested else ResumeMode.NONE

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._ran = True
        async with super().running():
            yield

    # ---------------------------------------------------------------- steps that their loops await

    async def generate(self, input_batch: Foreign) -> Foreign:
        """The generator's lists for a batch that ``prepare_generator_input`` has made."""
        if isinstance(input_batch, PromptBatch):
            return await super().generate(input_batch)
        await self.callback_handler.settle()
        version = self.policy_version
        self.checkpointer.ledger.start(self._prompts_of(input_batch), version)
        async with self.weight_updates.gate.entered(), self.context.phases.limited("generation"):
            self._rolling += 1
            try:
                with self.context.phases.under_way():
                    output: dict[str, Any] = dict(await self.generator.generate(self._request(input_batch)))
            finally:
                self._rolling -= 1
        self.all_metrics |= numbers(output.pop("rollout_metrics", None) or {})
        output.setdefault("rollout_versions", [[version] * len(tokens) for tokens in output["response_ids"]])
        return output

    async def eval(self, *more: object, **named: object) -> Metrics:
        return await self.evaluate()

    async def _sync(self) -> None:
        paused = self.weight_updates.engines_paused if self._rolling else nullcontext
        async with self.weight_updates.syncing():
            await self.weight_sync.sync(self.context.progress.step, paused)
        await self._settle()

    # ---------------------------------------------------------------- steps that their loops call

    def convert_to_training_input(self, generator_output: Mapping[str, Any], uids: Sequence[str]) -> TrainingInputBatch:
        from skyasync.rollout.collate import collate

        if isinstance(generator_output, Postprocessed):
            generator_output = generator_output[0]
        self.context.phases.begin_step(self.context.progress.step + 1)
        prompts = {uid: self.train_dataloader.asked[uid][0] for uid in uids if uid in self.train_dataloader.asked}
        groups = as_groups(generator_output, uids, prompts, self.policy_version)
        self.check_stale(groups)
        self.checkpointer.ledger.on_rollout(self, groups)
        self.all_metrics |= self.reporter.rolled_out(groups)
        kept = self.drop_truncated(self.filter_groups(groups))
        if not kept:
            raise UserError("no group of this batch is worth training on (trainer.algorithm.dynamic_sampling)")
        return self._view(collate(kept))

    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
        async def score() -> Foreign:
            return await self.learner.scored(self.shape_rewards(await self.ask_roles(training_input.batch)))  # type: ignore[arg-type]

        training_input.batch = self._loop.wait_for(score())
        return training_input

    def train_critic_and_policy(self, data: TrainingInputBatch) -> Metrics:
        return self._loop.wait_for(self._learn(data))

    async def _learn(self, data: TrainingInputBatch) -> Metrics:
        batch, trainer, groups = self.add_teacher_advantages(data.as_training()), self.cfg.trainer, self._groups
        self.checkpointer.between_steps = False
        with self.timed("update"):
            for _ in range(trainer.update_epochs_per_batch):
                for part, _ in batch.mini_batches(trainer.policy_mini_batch_size):
                    await self.forward_backward(part)
                    await self.optimizer_step()
        self.metrics.update(status := self.learner.finish(batch))
        uids = [str(group.prompt.id) for group in groups]
        last = max((self.train_dataloader.asked[uid][1] for uid in uids), key=lambda asked: asked.position)
        self.train_dataloader.forget(uids)
        theirs, self._their_step = self._their_step, None  # they count the step in hand, we the steps done
        try:
            await self.finish_step(Rollout(groups, last.position, {}, last.trained_early))
        finally:
            self._their_step = theirs
        self.all_metrics |= self.metrics
        if self.context.progress.step == trainer.max_training_steps + 1 > 1:
            self._warn(
                f"trains on behind trainer.max_training_steps={trainer.max_training_steps}, which it does not read"
            )
        return status

    def _warn_of_unread(self) -> None:
        """What a loop of theirs that has ended well has left undone."""
        step, trainer = self.context.progress.step, self.cfg.trainer
        if step < self.total_training_steps:
            self._warn(f"has ended after {step} of the {self.total_training_steps} steps of trainer.epochs="
                       f"{trainer.epochs} and trainer.max_training_steps={trainer.max_training_steps}")  # fmt: skip
        if (
            0 < trainer.ckpt_interval <= step
            and self.checkpointer.checkpoints is not None
            and not self.checkpointer.saved_step
        ):
            self._warn(f"has saved no checkpoint: it does not read trainer.ckpt_interval={trainer.ckpt_interval}")

    def _warn(self, what: str) -> None:
        warnings.warn(f"{type(self).__name__}.train {what}", stacklevel=2)

    def save_checkpoints(self) -> str:
        """Written when this returns."""
        folder = self._loop.wait_for(self.checkpointer.save(patient=False))
        self._loop.wait_for(self._notify_of_checkpoints())
        return str(folder or "")

    def load_checkpoints(self) -> tuple[int, str]:
        """The step that the run goes on from, 0 where there is no checkpoint, and its folder."""
        self._loop.wait_for(self.checkpointer.resume())
        kept = self.checkpointer.checkpoints
        return self.context.progress.step, str(kept.folder if kept is not None else "")

    def save_models(self) -> str:
        """The model in Hugging Face's form, in ``trainer.export_path``."""
        if not self.cfg.trainer.export_path:
            raise UserError("save_models needs a folder: set trainer.export_path")
        self._loop.wait_for(self.context.dispatch.export(Path(self.cfg.trainer.export_path)))
        return str(self.cfg.trainer.export_path)

    def handle_dynamic_sampling(self, output: Foreign, uids: Sequence[str]) -> tuple[Foreign, list[str], bool]:
        """Groups are filtered where they become a batch; none is sampled anew."""
        return output, list(uids), False

    def init_weight_sync_state(self) -> None: ...
    def build_models(self, *workers: object) -> None: ...
    def _profiler_start(self) -> None: ...
    def _profiler_step(self) -> None: ...
    def _profiler_stop(self) -> None: ...

    def _remove_tail_data(self, entries: list[Any]) -> list[Any]:
        return entries  # batches of any size are divided among the ranks

    def _prompts_of(self, batch: Foreign) -> list[Prompt]:
        uids = dict.fromkeys(trajectory.instance_id for trajectory in batch["trajectory_ids"])
        return [self.train_dataloader.asked[uid][0] for uid in uids if uid in self.train_dataloader.asked]

    def _request(self, batch: Foreign) -> GeneratorInput:
        prompts = {uid: prompt for uid, (prompt, _) in self.train_dataloader.asked.items()}
        limit = {"max_turns": self.cfg.generator.max_turns} if self.cfg.generator.max_turns else {}
        usual = sampling_params(self.cfg.generator.sampling_params)
        return {
            "prompts": batch["prompts"],
            "env_classes": batch["env_classes"],
            "env_extras": [{**extras, **limit} for extras in batch["env_extras"]],
            "sampling_params": as_sampling(batch["sampling_params"], usual),
            "trajectory_ids": [
                TrajectoryId(prompts[t.instance_id].id if t.instance_id in prompts else PromptId(0, 0), t.repetition_id)
                for t in batch["trajectory_ids"]
            ],
            "is_eval": False,
        }


def _to_its_end(theirs: Callable[[Foreign], Awaitable[None]]) -> Callable[[Foreign], Awaitable[None]]:
    """A ``train`` of theirs, with the end that ours has in ``running``."""

    async def train(self: RayPPOTrainer) -> None:
        if self._begun:  # super().train()
            return await theirs(self)
        self._begun = self.context.phases.plan_runs = True

        async def end() -> None:
            if not self._ran:
                await self._close()
            self._loop.close()

        async with afterwards(end):
            await theirs(self)
            if not self._ran:
                self._warn_of_unread()

    train.__doc__ = theirs.__doc__
    return train


T = TypeVar("T")


class Loop:
    """Starts its thread when it is first needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call, whatever thread asks."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="steps of a loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
