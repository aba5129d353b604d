"""The steps that loops of SkyRL's are made of, so that a ``train()`` of its tutorials trains here.

    our plan   ──▶ hooks (output, uids) / (data["rewards"], ...), see ``hooks``
    their loop ──▶ generate ─▶ convert_to_training_input ─▶ fwd_logprobs_values_reward ─▶ apply_reward_kl_penalty
                   ─▶ compute_advantages_and_returns ─▶ train_critic_and_policy ─▶ dispatch.save_weights_for_sampler

| who waits                    | for what                                       | woken by                     |
|------------------------------|------------------------------------------------|------------------------------|
| a step that is not ``async`` | workers, files                                 | ``StepLoop``, another thread |
| ``save_weights_for_sampler`` | the engines' weight update; ``step_timeout_s`` | its end, or its failure      |

Invariant: both ways train by the same code, ours; only names and forms differ, and nothing is computed twice.
Source: SkyRL's tutorial on asynchronous training and the names in its ``trainer.py``.

The experiment's configuration is ours, keys and all; their keys are answered with ours (``skyasync translate``).
Source: ``skyrl/train/entrypoints/main_base.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar

from skyasync import trainer
from skyasync.config import Config as Ours
from skyasync.config import load_config
from skyasync.config.check import check_config
from skyasync.config.load import ConfigError
from skyasync.config.resume import Resume
from skyasync.config.schema import GeneratorConfig, TrainerConfig
from skyasync.config.schema.algorithm import AlgorithmConfig
from skyasync.data.prompts import PromptBatch
from skyasync.envs import Foreign
from skyasync.errors import UserError
from skyasync.interop.skyrl.batch import TrainingInputBatch, as_groups
from skyasync.interop.skyrl.generators import InferenceEngineClient, as_sampling
from skyasync.interop.skyrl.gym import numbers
from skyasync.interop.skyrl.hooks import Postprocessed, SkyRLNames
from skyasync.interop.skyrl.shims import DispatchView, PolicyModel, ResumeMode
from skyasync.registry import add_user_parts, user_parts
from skyasync.rollout.generator_api import sampling_params
from skyasync.rollout.types import GeneratorInput, PromptId, Rollout, TrajectoryId
from skyasync.run import experiment
from skyasync.run.placement import plan_slots
from skyasync.run.ray_cluster import start_on_loopback
from skyasync.trainer.context import Metrics
from skyasync.utils.task_group import afterwards
from skyasync.workers.roles import CRITIC_ROLE, ROLES


class SkyRLTrainer(SkyRLNames, trainer.RayPPOTrainer):
    """Our synchronous plan with SkyRL's names; a subclass may bring a ``train`` of theirs."""

    ref_model = critic_model = None  # the dispatch has the models' calls

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "train" in vars(cls):
            cls.train = _with_our_end(vars(cls)["train"])  # type: ignore[method-assign]

    def __init__(self, *args: Foreign, **parts: Foreign) -> None:
        super().__init__(*args, **parts)
        self._loop = StepLoop()
        self._generating = 0  # calls of generate that have not returned
        self._in_their_train = self._ran = False  # a train of theirs; our own beginning and end
        self.policy_model = PolicyModel(self._sync)

    @property
    def dispatch(self) -> Foreign:
        return DispatchView(self.context.dispatch, self._sync)

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
        version, settings = self.policy_version, self.cfg.generator
        ids = input_batch["trajectory_ids"]
        known, uids = self.train_dataloader.requests, dict.fromkeys(t.instance_id for t in ids)
        prompts = {uid: known[uid][0] for uid in uids if uid in known}
        limit = {"max_turns": settings.max_turns} if settings.max_turns else {}
        request: GeneratorInput = {
            "prompts": input_batch["prompts"],
            "env_classes": input_batch["env_classes"],
            "env_extras": [{**extras, **limit} for extras in input_batch["env_extras"]],
            "sampling_params": as_sampling(input_batch["sampling_params"], sampling_params(settings.sampling_params)),
            "trajectory_ids": [
                TrajectoryId(prompts[t.instance_id].id if t.instance_id in prompts else PromptId(0, 0), t.repetition_id)
                for t in ids
            ],
            "is_eval": False,
        }
        self.checkpointer.ledger.start(list(prompts.values()), version)
        async with self.weight_updates.gate.entered(), self.context.phases.limited("generation"):
            self._generating += 1
            try:
                with self.context.phases.under_way():
                    output: dict[str, Any] = dict(await self.generator.generate(request))
            finally:
                self._generating -= 1
        self.all_metrics |= numbers(output.pop("rollout_metrics", None) or {})
        output.setdefault("rollout_versions", [[version] * len(tokens) for tokens in output["response_ids"]])
        return output

    async def eval(self, *more: object, **named: object) -> Metrics:
        return await self.evaluate()

    async def _sync(self) -> None:
        paused = self.weight_updates.engines_paused if self._generating else nullcontext
        async with self.weight_updates.syncing():
            await self.weight_sync.sync(self.context.progress.step, paused)
        await self._settle()

    # ---------------------------------------------------------------- steps that their loops call

    def convert_to_training_input(self, generator_output: Mapping[str, Any], uids: Sequence[str]) -> TrainingInputBatch:
        from skyasync.rollout.collate import collate

        if isinstance(generator_output, Postprocessed):
            generator_output = generator_output[0]
        self.context.phases.begin_step(self.context.progress.step + 1)
        requests = self.train_dataloader.requests
        prompts = {uid: requests[uid][0] for uid in uids if uid in requests}
        groups = as_groups(generator_output, uids, prompts, self.policy_version)
        self.check_stale(groups)
        self.checkpointer.ledger.on_rollout(self, groups)
        self.all_metrics |= self.reporter.rolled_out(groups)
        retained = self.drop_truncated(list(self.filter_groups(groups)))
        if not retained:
            raise UserError("no group of this batch is worth training on (trainer.algorithm.dynamic_sampling)")
        return self._view(collate(retained))

    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
        async def score() -> Foreign:
            return await self.learner.scored(self.shape_rewards(await self.ask_roles(training_input.batch)))  # type: ignore[arg-type]

        training_input.batch = self._loop.wait_for(score())
        return training_input

    def train_critic_and_policy(self, data: TrainingInputBatch) -> Metrics:
        return self._loop.wait_for(self._train_step(data))

    async def _train_step(self, data: TrainingInputBatch) -> Metrics:
        batch, settings, groups = self.add_teacher_advantages(data.as_training()), self.cfg.trainer, self._groups
        self.checkpointer.between_steps = False
        with self.timed("update"):
            for _ in range(settings.update_epochs_per_batch):
                for part, _ in batch.mini_batches(settings.policy_mini_batch_size):
                    await self.forward_backward(part)
                    await self.optimizer_step()
        self.metrics.update(status := self.learner.finish(batch))
        trained = [self.train_dataloader.requests.pop(uid)[1] for uid in {str(group.prompt.id) for group in groups}]
        last = max(trained, key=lambda batch: batch.position)
        theirs, self._their_step = self._their_step, None  # they count the current step, we the steps done
        try:
            await self.finish_step(Rollout(groups, last.position, {}, last.trained_early))
        finally:
            self._their_step = theirs
        self.all_metrics |= self.metrics
        most = settings.max_training_steps
        if self.context.progress.step == most + 1 > 1:
            self._warn(f"trains on behind trainer.max_training_steps={most}, which it does not read")
        return status

    def _warn(self, what: str) -> None:
        warnings.warn(f"{type(self).__name__}.train {what}", stacklevel=2)

    def save_checkpoints(self) -> str:
        """Save one, and wait for it; its folder."""
        folder = self._loop.wait_for(self.checkpointer.save(patient=False))
        self._loop.wait_for(self._notify_of_checkpoints())
        return str(folder or "")

    def load_checkpoints(self) -> tuple[int, str]:
        """The step that the run resumes at, 0 without a checkpoint, and the checkpoints' folder."""
        self._loop.wait_for(self.checkpointer.resume())
        checkpoints = self.checkpointer.checkpoints
        return self.context.progress.step, str(checkpoints.folder if checkpoints is not None else "")

    def save_models(self) -> str:
        """Write the model as a Hugging Face folder, ``trainer.export_path``."""
        if not self.cfg.trainer.export_path:
            raise UserError("save_models needs a folder: set trainer.export_path")
        self._loop.wait_for(self.context.dispatch.export(Path(self.cfg.trainer.export_path)))
        return str(self.cfg.trainer.export_path)

    def handle_dynamic_sampling(self, output: Foreign, uids: Sequence[str]) -> tuple[Foreign, list[str], bool]:
        """Groups are filtered when they become a batch; none is sampled again."""
        return output, list(uids), False

    def _nothing(self, *arguments: object, **named: object) -> None:
        """Workers and weight sync are ready, and ``trainer.profile_steps`` works, without these calls."""

    init_weight_sync_state = build_models = _profiler_start = _profiler_step = _profiler_stop = _nothing


RayPPOTrainer = SkyRLTrainer
# Batches of any size are divided among the ranks. The name is theirs, not one of the glossary.
setattr(SkyRLTrainer, "_remove_tail_data", staticmethod(lambda entries: entries))  # noqa: B010


def _with_our_end(theirs: Callable[[Foreign], Awaitable[None]]) -> Callable[[Foreign], Awaitable[None]]:
    """A ``train`` of theirs, with the end that ours has in ``running``."""

    async def train(self: SkyRLTrainer) -> None:
        if self._in_their_train:  # super().train()
            return await theirs(self)
        self._in_their_train = self.context.phases.plan_runs = True

        async def end() -> None:
            if not self._ran:
                await self._close()
            self._loop.close()

        async with afterwards(end):
            await theirs(self)
            if self._ran:
                return
            settings, step, total = self.cfg.trainer, self.context.progress.step, self.total_training_steps
            most = f"trainer.max_training_steps={settings.max_training_steps}"
            if step < total:
                limits = f"trainer.epochs={settings.epochs} and {most}"
                self._warn(f"has ended after {step} of the {total} steps of {limits}")
            saves = self.checkpointer.checkpoints is not None and 0 < settings.ckpt_interval <= step
            if saves and not self.checkpointer.saved_step:
                self._warn(f"has saved no checkpoint: it does not read trainer.ckpt_interval={settings.ckpt_interval}")

    train.__doc__ = theirs.__doc__
    return train


T = TypeVar("T")


class StepLoop:
    """An event loop in a thread of its own, which starts with the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call, in any thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="steps of a loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


@dataclass
class SkyRLTrainConfig(Ours):
    """Ours, made from overrides. Keys of one's own are fields of a subclass."""

    @classmethod
    def from_cli_overrides(cls, args: Sequence[str] | Mapping[str, object]) -> Self:
        """From ``key=value`` arguments, or a mapping of keys to values.

        Raises:
            UserError: naming each key or value that is wrong, with the nearest right one.
        """
        if isinstance(args, Mapping):
            args = [f"{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in args.items()]
        return load_config(list(args), schema=cls)


Config = SkyRLTrainConfig


def validate_cfg(cfg: Ours) -> None:
    """Raises ``UserError`` if settings contradict each other (which loading them has already rejected)."""
    if problems := check_config(cfg):
        raise ConfigError(problems)


def make_config(
    algorithm_cls: type = AlgorithmConfig, trainer_cls: type = TrainerConfig, generator_cls: type = GeneratorConfig
) -> type[SkyRLTrainConfig]:
    """A configuration whose groups are these classes, with keys of their own."""
    algorithm = ("algorithm", algorithm_cls, field(default_factory=algorithm_cls))
    trainer = make_dataclass(trainer_cls.__name__, [algorithm], bases=(trainer_cls,))
    groups = [
        (name, group, field(default_factory=group))
        for name, group in (("trainer", trainer), ("generator", generator_cls))
    ]
    return make_dataclass("Config", groups, bases=(SkyRLTrainConfig,))


def initialize_ray(cfg: Ours) -> None:
    """Start Ray on this machine, whose processes know what the program has registered so far.

    An experiment can run in a task then, as SkyRL's entry points do it; ``exp.run()`` alone needs none of this.
    """
    import ray

    if ray.is_initialized() or cfg.ray.address:
        return
    parts = user_parts()

    def add_parts() -> None:
        add_user_parts(parts)

    bundles = plan_slots(cfg, gpus=False, roles=[role for role in ROLES.values() if role.has_ranks(cfg)]).bundles
    cores = max(os.cpu_count() or 1, len(bundles) + 1)  # the entry point's task has one
    start_on_loopback(num_cpus=cores, runtime_env={"worker_process_setup_hook": add_parts})


class SkyRLExperiment(experiment.BasePPOExp):
    """Ours, whose inference client also answers batches in SkyRL's form."""

    def get_inference_client(self) -> Foreign:
        sampling, model = sampling_params(self.cfg.generator.sampling_params), str(self.cfg.trainer.policy.model.path)
        length = self.engine_config().max_model_len
        client = super().get_inference_client()
        return InferenceEngineClient(client, lambda: self.tokenizer, sampling, length, model)

    def _setup_trainer(self) -> SimpleNamespace:
        """For an experiment whose own ``run`` is ``asyncio.run(self._setup_trainer().train())``: the whole run."""
        return SimpleNamespace(train=lambda: asyncio.to_thread(experiment.BasePPOExp.run, self))


BasePPOExp = SkyRLExperiment
