"""The synchronous plan, and every step that plans are made of.

Invariant: a step is complete in itself (metrics, timeline, errors), so a plan is only the order in which
steps run and who waits for whom. This file knows neither Ray nor an engine: it is handed its parts, and
takes its time from the event loop, so it runs on a cluster, in one process and on virtual time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from skyasync.callbacks import TrainerCallback
from skyasync.cleanup import afterwards
from skyasync.config.domains import proportions_of
from skyasync.errors import UserError
from skyasync.handover import HandOver
from skyasync.learning import Learning
from skyasync.observe.timeline import Timeline
from skyasync.observe.usage import UsageMeter
from skyasync.phases import Metrics
from skyasync.rollout.convert import groups_from_output
from skyasync.rollout.gate import Gate
from skyasync.rollout.metrics import eval_name, rollout_metrics, sample_records, staleness_metrics
from skyasync.rollout.prompts import PromptBatch, PromptStream, prompts_of_run
from skyasync.rollout.requests import eval_prompts, eval_request, train_request
from skyasync.rollout.types import GeneratorInput, GeneratorOutput, Group, Prompt, Rollout
from skyasync.state.checkpoint import Checkpoints
from skyasync.state.saving import Saving


class RayPPOTrainer(Learning, HandOver, Saving):
    """Generate, train, sync, one after the other: every sample is from the newest policy.

    | who waits      | for what                      | woken by                          |
    |----------------|-------------------------------|-----------------------------------|
    | ``train``      | the trajectories of this step | the generator (engines)           |
    | ``train``      | the update                    | the workers                       |
    | ``train``      | the weights in every engine   | the weight sync                   |

    Subclass it and override a hook (``postprocess_generator_output``, ``filter_groups``,
    ``apply_reward_kl_penalty``, ``compute_advantages_and_returns``) to change the algorithm, or ``train`` to
    change the plan. Hooks combine with every plan by inheritance.

    Args:
        cfg: a ``skyasync.config.Config``.
        tracker: receives ``log(metrics, step)``.
        train_dataset: prompts; see ``skyasync.rollout.prompts``.
        generator: anything with ``async generate(GeneratorInput) -> GeneratorOutput``.

    Raises:
        UserError: if the plan is asynchronous and nothing corrects for stale samples.
    """

    #: Samples may come from an older policy than the one they train: a correction is needed.
    asynchronous: bool = False
    #: Keys that ``train`` reads and other plans do not; a key that the chosen plan does not read is refused.
    reads: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        cfg: Any,
        tracker: Any,
        tokenizer: Any,
        train_dataset: Sequence[Prompt],
        inference_engine_client: Any,
        generator: Any,
        colocate_pg: Any = None,
        eval_dataset: Sequence[Prompt] | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
    ) -> None:
        from skyasync.algorithms.kl import kl_controller
        from skyasync.algorithms.objective import Objective

        self.cfg, self.tracker, self.tokenizer = cfg, tracker, tokenizer
        self.inference_engine_client, self.generator = inference_engine_client, generator
        self.colocate_pg, self.callbacks = colocate_pg, list(callbacks or [])
        self.eval_dataset = eval_prompts(eval_dataset or [])
        self.dataset_size = len(train_dataset)
        self.prompts = PromptStream(
            train_dataset,
            cfg.trainer.train_batch_size,
            cfg.trainer.seed,
            prompts_of_run(cfg.trainer, self.dataset_size),
            proportions_of(cfg.environment.domains),
        )
        if cfg.trainer.algorithm.advantage_estimator == "gae":
            raise UserError("trainer.algorithm.advantage_estimator=gae needs a critic, and there is none: choose grpo")
        self.objective = Objective(cfg.trainer.algorithm)
        self.kl_controller = kl_controller(cfg.trainer.algorithm)
        if self.asynchronous and not self.objective.corrected and not cfg.trainer.allow_uncorrected:
            raise UserError(
                f"{type(self).__name__} trains on stale samples, but neither trainer.algorithm.policy_loss_type="
                f"{cfg.trainer.algorithm.policy_loss_type} nor trainer.algorithm.off_policy_correction="
                f"{cfg.trainer.algorithm.off_policy_correction} uses the behaviour policy; choose a correction "
                f"(token_tis), or set trainer.allow_uncorrected=true"
            )
        self.global_step = 0  # steps trained
        self.policy_version = 0  # weight syncs finished: what the engines stamp
        self.position, self.ahead = 0, frozenset[int]()  # prompts trained: all before the one, and those in the other
        self.gate = Gate()  # where rollouts for training can be kept out of the engines
        self.phase_name, self._plan_runs = "starting", False
        self.last_metrics: Metrics = {}
        self._metrics: Metrics = {}
        self._trained_samples = 0
        self._step, self._step_started = 0, 0.0  # the step in hand; 0 before the first
        self.attach(None, None)

    @classmethod
    def get_trainer(cls, **parts: Any) -> RayPPOTrainer:
        """Make a trainer from the parts that ``BasePPOExp`` has built."""
        return cls(**parts)

    def attach(self, dispatch: Any, weight_sync: Any, *, timeline: Timeline | None = None, run_dir: Any = None) -> None:
        """Hand over what the steps work with: the models, the way to the engines, and where to write."""
        self.dispatch, self.weight_sync, self.run_dir = dispatch, weight_sync, run_dir
        self.timeline = timeline or Timeline(None)
        folder = self.cfg.trainer.ckpt_path or (run_dir and run_dir.checkpoints)
        self.checkpoints = Checkpoints(Path(folder), self.cfg.trainer.ckpt_keep) if folder else None

    # ---------------------------------------------------------------- the plan

    async def train(self) -> None:
        """THE PLAN: the only method that another plan overrides."""
        async with self.running():
            for prompts in self.remaining_prompts():
                rollout = await self.generate(prompts)
                status = await self.train_on(rollout)
                await self.sync_policy_weights_to_inference_engines()
                await self.end_step(status)

    # ---------------------------------------------------------------- steps

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: those trained, and as many as the prompts that are left make.

        While rejected prompts are replaced this is the most that it can be.
        """
        left, most = self.prompts.steps(self.position, self.ahead), self.cfg.trainer.max_training_steps
        return self.global_step + (min(left, max(most - self.global_step, 0)) if most and self.refilling else left)

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.total_steps * self.updates_per_batch(self.cfg.trainer.train_batch_size)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Around every plan: start the parts, resume, sync, evaluate; at the end flush, whatever happened."""
        self._plan_runs = True
        async with afterwards(self._close):
            await self._begin()
            async with afterwards(self._save_on_exit, grace_s=self.cfg.trainer.step_timeout_s):
                yield
            self.phase_name = "finishing"
            if self.cfg.trainer.export_path:
                async with self._limited("export"):
                    await self.dispatch.export(Path(self.cfg.trainer.export_path))
            self._tell("on_train_end")
            self.phase_name = "finished"

    async def generate(self, prompts: PromptBatch) -> Rollout:
        """Prompts to groups of trajectories, stamped with the versions that computed them."""
        self._check_running("generate")
        left = prompts.position - self.position  # in the stream, up to and with this batch
        step = self.global_step - (-left // self.cfg.trainer.train_batch_size)
        if self.refilling:
            return await self.generate_full(prompts, step)
        return self.assemble(*await self.roll_out(prompts.prompts, step), prompts.position, prompts.ahead)

    async def roll_out(self, prompts: Sequence[Prompt], step: int | None = None) -> tuple[list[Group], Metrics]:
        """The episodes of some prompts as the generator gives them: a part of ``generate``, for plans that stream."""
        metrics: Metrics = {}
        async with self.gate.entered():
            version = self.policy_version
            with self.timed("generate", metrics, "rollout", step):
                output = await self._play("generation", train_request(prompts, self.cfg.generator))
        groups = groups_from_output(output, prompts, version, self.cfg.generator.n_samples_per_prompt)
        if self.refilling:  # what is worth keeping is decided by what will be trained
            groups = self.postprocess_generator_output(groups)
        return groups, metrics | (output.get("rollout_metrics") or {})

    async def train_on(self, rollout: Rollout) -> Metrics:
        """Groups to advantages to one or more updates; the policy is then one step newer."""
        self._check_running("train_on")
        self._metrics |= rollout.metrics | staleness_metrics(rollout.groups, self.global_step)
        with self.timed("train", self._metrics):
            await self.make_way_for_training()
            await self.whole(self._advance(rollout))
        return self._metrics

    async def _advance(self, rollout: Rollout) -> None:
        async with self._limited("update"):
            groups = rollout.groups if self.refilling else self._filtered(rollout.groups)
            groups = self.drop_truncated(groups)
            if groups:
                await self.learn_from(groups)
        self.global_step += 1
        self.position, self.ahead = rollout.position, rollout.ahead
        self._trained_samples = sum(len(group.trajectories) for group in rollout.groups)
        self._save_samples(rollout.groups)

    async def end_step(self, status: Metrics) -> None:
        """Evaluate, call back, save, log: the same in every plan. A step is logged when all of it is done."""
        self._check_running("end_step")
        self._metrics |= status  # a plan's status may be a copy
        status, is_last = self._metrics, self.global_step >= self.total_steps
        async with self._limited("report of the engines"):
            status |= await self._usage.lap(self._now() - self._step_started, self._trained_samples)
        if self._due(self.cfg.trainer.eval_interval) or is_last:
            status |= await self.evaluate()
        self._tell("on_step_end", status)
        if self._due(self.cfg.trainer.ckpt_interval) or (is_last and self.cfg.trainer.ckpt_interval):
            await self.save_checkpoint()
        self.tracker.log(status, step=self.global_step)
        self.last_metrics, self._metrics = {**self.last_metrics, **status}, {}
        self.phase_name, self._step, self._step_started = "training", self.global_step + 1, self._now()

    async def evaluate(self) -> Metrics:
        """Score the held-out prompts under the engines' policy, which no plan changes meanwhile."""
        metrics: Metrics = {}
        if not self.eval_dataset:
            return metrics
        self.phase_name = "evaluating"
        groups: list[Group] = []
        async with self.without_rollouts() if self.cfg.trainer.eval_mode == "pause" else nullcontext():
            with self.timed("eval", metrics, track="evaluation"):
                for start in range(0, len(self.eval_dataset), self.cfg.trainer.eval_batch_size):
                    prompts = self.eval_dataset[start : start + self.cfg.trainer.eval_batch_size]
                    output = await self._play("evaluation", eval_request(prompts, self.cfg.generator))
                    samples = self.cfg.generator.eval_n_samples_per_prompt
                    groups += groups_from_output(output, prompts, self.policy_version, samples)
        found = rollout_metrics(groups)
        metrics |= {eval_name(name): value for name, value in found.items()}
        metrics["eval/version"] = float(self.policy_version)
        self._tell("on_evaluate", metrics)
        return metrics

    # ---------------------------------------------------------------- hooks for algorithms

    def postprocess_generator_output(self, groups: list[Group]) -> list[Group]:
        """Change trajectories or their rewards before anything is computed from them.

        Called with a whole batch, or, where rejected groups are replaced, with those that arrive together.
        """
        return groups

    # ---------------------------------------------------------------- details

    def _check_running(self, step: str) -> None:
        if not self._plan_runs:
            raise UserError(
                f"{type(self).__name__}.train calls {step} outside of `async with self.running():`, which starts the "
                f"parts, syncs the first weights and ends the run: put the plan's steps inside it"
            )

    async def _play(self, what: str, request: GeneratorInput) -> GeneratorOutput:
        self.check_awake()
        async with self._limited(what):
            return await self.generator.generate(request)

    async def _close(self) -> None:
        try:
            self.tracker.close()
        finally:
            self.timeline.close()

    async def _begin(self) -> None:
        resumed = await self._resume()
        await self.sync_policy_weights_to_inference_engines()
        self._tell("on_train_begin")
        if self.cfg.trainer.eval_before_train and not resumed:
            first = await self.evaluate()
            self.tracker.log(first, step=0)
            self.last_metrics |= first
        self._usage = UsageMeter(self.inference_engine_client, self.dispatch)
        await self._usage.start()
        self._metrics, self.phase_name = {}, "training"
        self._step, self._step_started = self.global_step + 1, self._now()

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.global_step % interval == 0

    def _save_samples(self, groups: list[Group]) -> None:
        if self.run_dir is not None and self.cfg.trainer.save_samples:
            records = sample_records(groups, self.cfg.trainer.save_samples, self.tokenizer.decode)
            self.run_dir.write_samples(self.global_step, records)

    def _tell(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)
