"""The synchronous plan, and every step that plans are made of.

Invariant: a step is complete in itself (metrics, timeline, errors), so a plan is only the order in
which steps run and who waits for whom. This file uses neither Ray nor an engine: it is given its
parts, and the event loop is its clock. So it runs on a cluster, in one process and in simulation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from itertools import chain
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Unpack

from skyasync.callbacks import RunExtension
from skyasync.config.parts import Plan, check_correction, reads_behaviour
from skyasync.config.resume import keeps_checkpoints
from skyasync.config.schema import Config
from skyasync.config.schema.algorithm import check_streaming
from skyasync.data.prompts import PromptBatch, PromptStream
from skyasync.errors import NonFiniteError, UserError
from skyasync.observability.jsonl import read_rows
from skyasync.observability.run_dir import RunDirectory, give_reason
from skyasync.observability.timeline import Timeline
from skyasync.observability.trackers import Tracker
from skyasync.rollout.episode_limits import check_given_up
from skyasync.rollout.evaluation import Scoring, eval_metrics, eval_requests
from skyasync.rollout.generator_api import (
    Generator,
    eval_prompts,
    hands_over_trajectories,
    rollout_requests,
    run_generator,
)
from skyasync.rollout.metrics import staleness_metrics
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Group, Prompt, Rollout
from skyasync.trainer.checkpoint.checkpointer import Checkpointer
from skyasync.trainer.checkpoint.checkpoints import Checkpoints
from skyasync.trainer.context import Client, Metrics, Parts, RunContext
from skyasync.trainer.extensions import notify
from skyasync.trainer.extensions.divergence_guard import UNDONE, DivergenceGuard
from skyasync.trainer.extensions.prompt_ledger import LEFT_OUT, NO_SIGNAL, TRUNCATED, PromptLedger
from skyasync.trainer.extensions.reporting import Profiler, Reporter
from skyasync.trainer.extensions.staleness_control import StalenessControl
from skyasync.trainer.hooks import AlgorithmHooks, with_advantages
from skyasync.trainer.learner import Learner
from skyasync.trainer.plan_tasks import PlanTasks, RunStopped
from skyasync.trainer.plans import PLANS
from skyasync.trainer.weight_updates import WeightSyncing, WeightUpdates
from skyasync.utils.task_group import afterwards
from skyasync.weight_sync.colocation import Colocation
from skyasync.workers.roles import CRITIC_ROLE, POLICY, ROLES

if (
    TYPE_CHECKING
):  # torch is imported when training starts, so that a wrong setting is refused at once
    from skyasync.models.batch import TrainingBatch
    from skyasync.workers.dispatch import Dispatch

T = TypeVar("T")

log = logging.getLogger(__name__)


class RemainingBatches:
    """The batches that are left to train; their number is that of the moment when this was made."""

    def __init__(self, trainer: RayPPOTrainer) -> None:
        self._trainer = trainer
        self._count = trainer.total_steps - trainer.global_step

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PromptBatch]:
        return self._trainer.remaining_prompts()


@PLANS.register("sync")
class RayPPOTrainer(AlgorithmHooks):
    """Generate, train, sync, one after the other: every sample is from the newest policy.

    | who waits      | for what                      | woken by                          |
    |----------------|-------------------------------|-----------------------------------|
    | ``train``      | the trajectories of this step | the generator (engines)           |
    | ``train``      | the update                    | the workers                       |
    | ``train``      | the weights in every engine   | the weight sync                   |

    Subclass it and override a hook (``postprocess_generator_output``, ``filter_groups``,
    ``apply_reward_kl_penalty``, ``compute_advantages_and_returns``) to change the algorithm, or
    ``train`` to change the plan. Hooks combine with every plan by inheritance.

    Args:
        cfg: a ``skyasync.config.Config``.
        tracker: receives ``log(metrics, step)``.
        train_dataset: prompts; see ``skyasync.data.prompts``.
        colocate_pg: what ``BasePPOExp.get_colocate_pg`` gave. Accepted for experiments that pass it
            on; not used.
        generator: anything with ``async generate(GeneratorInput) -> GeneratorOutput``; a
            ``TrajectoryGenerator`` gives trajectories, without lists in between.
        callbacks: further extensions of the run (``skyasync.callbacks``).

    Raises:
        UserError: if the plan is asynchronous and nothing corrects for stale samples.
    """

    #: Groups are trained before their batch is complete: nothing may depend on the whole batch.
    streams: bool = False
    #: Samples may come from an older policy than the one they train: a correction is needed.
    asynchronous: bool = False
    #: Engines that compute on the policy's devices between its training steps, with requests in flight: "all" of them,
    #: or "hybrid" ones next to others.
    shares_devices: str = ""
    #: ``train`` ends with the last prompt: a warning says if it ended before.
    trains_all: ClassVar[bool] = True
    #: Keys that ``train`` reads and other plans do not; a key that the chosen plan does not read is refused.
    reads: ClassVar[tuple[str, ...]] = ()

    #: The batches of a ``train`` in the form that SkyRL prints.
    train_dataloader: RemainingBatches

    def __init__(
        self,
        cfg: Config,
        tracker: Tracker,
        tokenizer: Tokenizer,
        train_dataset: Sequence[Prompt],
        inference_engine_client: Client,
        generator: Generator,
        colocate_pg: object = None,
        eval_dataset: Sequence[Prompt] | None = None,
        callbacks: Sequence[RunExtension] | None = None,
    ) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.generator = generator
        self.eval_dataset = eval_prompts(eval_dataset or [])
        self.generation_ack = asyncio.Event()
        self.sync_finished = asyncio.Event()
        self._all_generated = False
        self._open_step: Metrics | None = None  # trained, not ended yet
        self.context = RunContext(
            cfg, PromptStream.of_run(cfg, train_dataset), tracker, inference_engine_client
        )
        self.guard = DivergenceGuard(self.context)
        self.ledger = PromptLedger(self.context, generator)
        self.reporter = Reporter(self.context, tokenizer.decode if tokenizer else None)
        profiler = Profiler(self.context)
        self.extensions: list[RunExtension] = [self.ledger, profiler, self.guard, self.reporter]
        self.extensions += callbacks or ()
        # The program has checked these settings for the plan of trainer.plan: an experiment may
        # make another.
        plan = Plan.of(cfg, type(self))
        assert plan is not None
        control = None
        if cfg.trainer.staleness_control == "auto":
            bounded = plan.reads("trainer.max_staleness")
            if bounded:
                least = max(1, cfg.trainer.sync_interval - 1)
            else:
                least = None
            control = StalenessControl(self.context, plan.most_stale(cfg), least)
            self.extensions.append(control)
        self.learner = Learner(self.context, self.guard, control)
        self.weight_updates = WeightUpdates(self.context)
        self.checkpointer = Checkpointer(self.context, self.learner, self.ledger, self.extensions)
        for problem in chain(check_streaming(cfg, plan), check_correction(cfg, plan)):
            raise UserError(problem)
        self.context.on_policy = not plan.stale(cfg) and not reads_behaviour(cfg.trainer.algorithm)
        if (best := cfg.trainer.ckpt_best_metric).startswith("eval/") and not self.eval_dataset:
            raise UserError(
                f"trainer.ckpt_best_metric={best} needs held-out prompts: set data.val_data or data.val_sets"
            )

    @classmethod
    def get_trainer(cls, **parts: Unpack[Parts]) -> RayPPOTrainer:
        """Make a trainer from the parts that ``BasePPOExp`` has built."""
        return cls(**parts)

    def attach(
        self,
        dispatch: Dispatch,
        weight_sync: WeightSyncing,
        *,
        timeline: Timeline | None = None,
        run_dir: RunDirectory | None = None,
        colocation: Colocation | None = None,
    ) -> None:
        """Set what the steps work with: the models, the weight sync, and where to write.

        Args:
            colocation: schedules devices that models and engines share.
        """
        self.context.dispatch = dispatch
        self.context.run_dir = run_dir
        self.weight_updates.weight_sync = weight_sync
        self.weight_updates.colocation = colocation
        self.context.phases.timeline = timeline or Timeline(None)
        folder = self.cfg.trainer.ckpt_path or (run_dir and run_dir.checkpoints)
        if folder:
            self.checkpointer.checkpoints = Checkpoints(Path(folder), self.cfg.trainer.ckpt_keep)
        else:
            self.checkpointer.checkpoints = None

    # ---------------------------------------------------------------- the plan

    async def train(self) -> None:
        """THE PLAN: the only method that another plan overrides. ``run`` awaits it."""
        for prompts in self.remaining_prompts():
            rollout = await self.generate(prompts)
            status = await self.train_on(rollout)
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)

    def stop(self, reason: str) -> None:
        """End the run well after the current step, with its checkpoint and report; the run's status
        has the reason."""
        self.context.stop_reason = self.context.stop_reason or reason

    # ---------------------------------------------------------------- loops of a plan in SkyRL's
    # printed form

    def _run_generate_loop(
        self, generation_buffer: asyncio.Queue[Rollout]
    ) -> Coroutine[Any, Any, None]:
        """Generate all batches that are left, ahead of training by the size of the buffer.

        It waits for space in the buffer, and for ``sync_finished``. ``train_dataloader`` has its
        batches from the call on.
        """
        batches = self.train_dataloader = RemainingBatches(self)
        self._all_generated = False

        async def generate_batches() -> None:
            for index, prompts in enumerate(batches):
                rollout = await self.generate(prompts)
                if index >= generation_buffer.maxsize:
                    self.generation_ack.set()
                    await self.sync_finished.wait()
                    self.sync_finished.clear()
                await generation_buffer.put(rollout)
            self._all_generated = True
            self.generation_ack.set()

        return generate_batches()

    async def _run_training(self, generation_buffer: asyncio.Queue[Rollout]) -> Metrics:
        """Train the next batch of the buffer. Its step ends with ``end_step``, here or in the next
        call."""
        await self._end_open_step()
        if (
            self.global_step >= self.total_steps
        ):  # rejected prompts leave fewer batches than there seemed to be
            raise RunStopped
        rollout = await self.waiting("data", generation_buffer.get())
        self._open_step = await self.train_on(rollout)
        return dict(self._open_step)

    async def _end_open_step(self) -> None:
        if self._open_step is not None:
            await self.end_step(self._open_step)

    # ---------------------------------------------------------------- generation

    def remaining_prompts(self) -> Iterator[PromptBatch]:
        """The batches that have not been trained; ``generate`` may take prompts between two of
        them."""
        progress = self.context.progress
        cursor = self.context.prompts.cursor(progress.position, progress.trained_early)
        self.context.refill.cursor = cursor
        for _ in range(self.total_steps - self.global_step):
            batch = cursor.take(self.cfg.trainer.train_batch_size)
            if not batch.prompts:
                return
            yield batch

    async def generate(self, prompts: PromptBatch) -> Rollout:
        """Prompts to groups of trajectories; each token has the policy version that computed it."""
        self._check_running("generate")
        refill = self.context.refill
        untrained = 1 + max(prompts.positions, default=-1) - self.context.progress.position
        step = self.global_step + ceil(
            untrained / self.cfg.trainer.train_batch_size
        )  # that will train them
        if not refill.active:
            groups, metrics = await self.roll_out(prompts.prompts, step)
            return self.assemble(groups, metrics, prompts.positions)
        groups, rejected, metrics, positions = await refill.fill(
            prompts, step, self.roll_out, self.filter_groups
        )
        return self.assemble(groups, metrics, positions, rejected)

    async def roll_out(
        self, prompts: Sequence[Prompt], step: int | None = None
    ) -> tuple[list[Group], Metrics]:
        """The episodes of some prompts as the generator gives them: a part of ``generate``, for
        plans that stream."""
        metrics: Metrics = {}
        reported: Metrics = {}
        ledger = self.ledger
        scorer = self.context.reward_model
        async with self.weight_updates.gate.entered():
            version = self.policy_version
            evaluated_s = self.context.phases.evaluation_s()
            with self.timed("generate", metrics, "rollout", step):
                finished = ledger.start(prompts, version)  # in the checkpoint
                left = [prompt for prompt in prompts if prompt.id not in finished]
                if not self.shares_devices:  # else requests wait for the engines
                    self.weight_updates.check_awake(type(self).__name__)
                if scorer.overlaps and len(left) > 1 and hands_over_trajectories(self.generator):
                    groups = await scorer.score_while_generating(
                        lambda prompt: self._run_generator([prompt], self.policy_version), left
                    )
                else:
                    groups, reported = await self._run_generator(left, version)
                    await scorer.add_scores(groups)
                if groups:
                    await notify(self, "on_rollout", groups)
                if finished:
                    by_prompt = finished | {group.prompt.id: group for group in groups}
                    groups = [by_prompt[prompt.id] for prompt in prompts]
            metrics["rollout/in_evaluation"] = float(
                self.context.phases.evaluation_s() > evaluated_s
            )
        if self.context.refill.active:  # filters decide by what will be trained
            groups = list(self.postprocess_generator_output(groups))
        return groups, metrics | reported

    async def _run_generator(
        self, prompts: Sequence[Prompt], version: int
    ) -> tuple[list[Group], Metrics]:
        requests = rollout_requests(prompts, self.cfg.generator)
        async with self.context.generating("generation"):
            return await run_generator(self.generator, requests, version)

    def assemble(
        self,
        groups: list[Group],
        metrics: Metrics,
        positions: Sequence[int],
        rejected: Sequence[Group] = (),
        *,
        postprocessed: bool = False,
    ) -> Rollout:
        """The batch of a step, of finished groups. Metrics are of all groups, those ``rejected`` as
        well.

        Args:
            positions: of the prompts of all groups, in the stream.
        """
        refill = self.context.refill
        if not refill.active and not postprocessed:
            groups = list(self.postprocess_generator_output(groups))
        metrics = self.reporter.rolled_out([*groups, *rejected]) | metrics
        check_given_up([*groups, *rejected], self.cfg.environment.max_given_up)
        if refill.active:
            metrics |= refill.count(len(groups), len(rejected))
        results = [(g.prompt, [t.reward for t in g.played]) for g in [*groups, *rejected]]
        return Rollout(groups, positions, metrics, [group.prompt.id for group in rejected], results)

    # ---------------------------------------------------------------- training

    async def train_on(self, rollout: Rollout) -> Metrics:
        """Groups to advantages to one or more updates; the policy is then one step newer."""
        self._check_running("train_on")
        if self.global_step == self.context.phases.step:
            message = (
                "%s.train trains on without end_step: step %d is not logged, evaluated or saved"
            )
            log.warning(message, type(self).__name__, self.global_step)
        with self.timed("train"):
            await self.weight_updates.offload_engines()
            self.checkpointer.between_steps = False
            await self.checkpointer.uninterrupted(self._advance(rollout))
        return self.metrics

    async def _advance(self, rollout: Rollout) -> None:
        async with self.context.phases.limited("update"), self.keeping_bad(lambda: rollout):
            again = self.context.solved.draw(self.global_step)
            await self.learn_from([*rollout.groups, *again])
        await self.finish_step(rollout)

    @asynccontextmanager
    async def keeping_bad(self, rollout: Callable[[], Rollout]) -> AsyncIterator[None]:
        """Around updates: a batch that ends the run because something in it is not finite is
        written down."""
        try:
            yield
        except NonFiniteError:
            await self.reporter.keep_bad(rollout(), self.learner.parts)
            raise

    async def learn_from(self, groups: list[Group]) -> None:
        """The part of ``train_on`` that changes the weights: prepare, then mini-batch by
        mini-batch."""
        batch = await self.prepare(groups)
        trainer = self.cfg.trainer
        if batch is not None:
            with self.timed("update"):
                for _ in range(trainer.update_epochs_per_batch):
                    for part, _ in batch.mini_batches(trainer.policy_mini_batch_size):
                        await self.forward_backward(part)
                        await self.optimizer_step()
        self.metrics.update(self.learner.finish(batch))

    async def prepare(self, groups: list[Group]) -> TrainingBatch | None:
        """Filter, shape, collate; log-probabilities, KL, advantages. None if no group is worth
        training on.

        Needs whole groups, and all of them at once if the estimator compares prompts.
        """
        from skyasync.rollout.collate import collate_in_turns

        ledger = self.ledger
        metrics = self.metrics
        own = self.context.solved.without_replayed
        self.guard.check_rewards(groups, trained=True)
        self.learner.groups += groups
        self.reporter.prepared(groups)
        self.check_stale(groups)
        if not self.context.refill.active:  # else they were filtered as they came
            sampled = groups
            groups = list(self.filter_groups(groups))
            rejected = len(sampled) - len(groups)
            if rejected > 0 or self.cfg.trainer.algorithm.dynamic_sampling.type != "none":
                metrics["dynamic_sampling/rejected"] = (
                    metrics.get("dynamic_sampling/rejected", 0.0) + rejected
                )
            ledger.reject(own(sampled), own(groups), NO_SIGNAL)
        whole = groups
        groups = self.drop_truncated(groups)
        ledger.reject(own(whole), own(groups), TRUNCATED)
        if not groups:
            return None
        batch = self.shape_rewards(await self.ask_roles(await collate_in_turns(groups)))
        scored = self.apply_reward_kl_penalty(await self.learner.scored(batch))
        return self.add_teacher_advantages(
            with_advantages(self.compute_advantages_and_returns(scored))
        )

    async def forward_backward(self, part: TrainingBatch, *, complete: bool = True) -> None:
        """Add the gradient of a part of a prepared batch; ``complete``: it is all that the next
        update trains."""
        await self.learner.forward_backward(part, complete=complete)

    async def optimizer_step(self) -> Metrics:
        """Change the weights by the gradient that has been added up."""
        return await self.learner.optimizer_step()

    async def finish_step(self, rollout: Rollout) -> None:
        """The policy is one step newer: count it, and write down what it was trained on.

        Before the engines get the weights, a batch that is not finite is kept, and a step with a
        spike may be undone.
        """
        learner = self.learner
        guard = self.guard
        checkpointer = self.checkpointer
        own = {group.prompt.id for group in rollout.groups}
        again = [group for group in learner.groups if group.prompt.id not in own]
        learner.groups = []
        staleness = await staleness_metrics([*rollout.groups, *again], self.global_step)
        for name, value in (rollout.metrics | staleness).items():
            self.metrics.setdefault(name, value)  # metrics of a hook have precedence
        self.weight_updates.check_sampled_tokens(self.metrics)
        run_dir = self.context.run_dir
        if guard.dropped:
            await self.reporter.keep_bad(rollout, learner.trained)
            guard.check_dropped()
            if "policy/loss" not in self.metrics:
                self.ledger.undone = LEFT_OUT
        if guard.must_undo(self.metrics):
            guard.undone(restored := await checkpointer.roll_back())
            rows = read_rows(run_dir.ledger) if run_dir is not None else ()
            own_rows = [
                row for row in rows if row["step"] <= self.global_step
            ]  # others are of before a resume
            self.ledger.undo(restored, own_rows)
            self.context.solved.undo(restored)
        if not self.ledger.undone:
            self.context.solved.trained(rollout.groups, self.global_step + 1)
        self.context.progress.trained(rollout.positions)
        self.metrics.update(
            self.context.prompts.observe(rollout.results, self.context.progress.position)
        )
        if self.cfg.data.replay_groups:
            self.metrics["sampler/replayed"] = float(len(self.context.solved.replayed))
        checkpointer.between_steps = True
        step = self.global_step
        await self.reporter.ended(step, self.ledger.close(rollout))
        trained = learner.trained
        learner.trained = []
        await self.reporter.trained(step, rollout, trained)
        if (
            self.context.schedule.reached("export", step) and run_dir is not None
        ):  # while the policy has its devices
            with self.timed("export"):
                async with self.context.phases.limited("export"):
                    await self.context.dispatch.export(
                        run_dir.path / "exports" / f"step_{step:06d}", POLICY
                    )

    # ---------------------------------------------------------------- weight sync

    async def sync_policy_weights_to_inference_engines(self) -> None:
        """Give the newest weights to engines that are idle, in the steps in which that is
        scheduled."""
        if self.weight_updates.scheduled(last=self.global_step >= self.total_steps):
            async with self.weight_updates.syncing():
                await self.weight_updates.weight_sync.sync(self.global_step)
            await notify(self, "on_weight_update", self.policy_version)

    async def async_sync_policy_weights_to_inference_engines(self) -> None:
        """Give the newest weights to busy engines; ``partial_rollout`` decides what becomes of
        their requests."""
        updates = self.weight_updates
        if not updates.scheduled(last=self.global_step >= self.total_steps):
            return
        if self.cfg.trainer.partial_rollout == "wait":
            async with updates.without_rollouts():
                await self.sync_policy_weights_to_inference_engines()
        else:
            async with updates.syncing():
                await updates.weight_sync.sync(self.global_step, updates.engines_paused)
            await notify(self, "on_weight_update", self.policy_version)

    # ---------------------------------------------------------------- end of a step

    async def end_step(self, status: Metrics) -> None:
        """Evaluate, call back, save, log: the same in every plan. A step is logged when all of it
        is done.

        The step's time ends here. What follows is the next step's, except for evaluation and
        checkpoint.
        """
        self._check_running("end_step")
        self._open_step = None
        self.metrics.update(status)  # a plan's status may be a copy
        with self.context.phases.timeline.span("end_step", "trainer", step=self.global_step):
            await self._end_step()

    async def _end_step(self) -> None:
        metrics = self.metrics
        step = self.global_step
        phases = self.context.phases
        schedule = self.context.schedule
        with phases.timed("counters"):
            async with phases.limited("report of the engines"):
                metrics |= (
                    await self.reporter.end_interval()
                )  # what follows is the next step's time
        evaluated = schedule.reached("evaluation", step) or step >= self.total_steps
        if evaluated:
            metrics |= await self.evaluate()
        await notify(self, "on_step_end", metrics)
        metrics |= await self.checkpointer.arrived()
        await self._notify_of_checkpoints()
        best = self.checkpointer.improves(metrics, evaluated=evaluated and bool(self.eval_dataset))
        stopped = bool(self.context.stop_reason)
        last = (step >= self.total_steps or stopped) and keeps_checkpoints(self.cfg.trainer)
        if schedule.reached("checkpoint", step) or best or last or UNDONE in metrics:
            self.reporter.write_now(metrics, step)
            await self.save_checkpoint()
        self.reporter.log(metrics, step)
        if stopped and step < self.total_steps:
            raise RunStopped
        await self._begin_step(step + 1)

    async def evaluate(self) -> Metrics:
        """Score the held-out prompts under the engines' policy, which no plan changes meanwhile."""
        metrics: Metrics = {}
        if not self.eval_dataset:
            return metrics
        self.context.phases.name = "evaluating"
        pause = self.cfg.trainer.eval_mode == "pause"
        with self.timed("eval", metrics, "evaluation"):
            # Waiting for rollouts in flight is a part of the evaluation's time, not of the step's.
            async with self.weight_updates.gate.closed() if pause else nullcontext():
                groups: list[Group] = []
                for requests in eval_requests(self.eval_dataset, self.cfg):
                    if not self.shares_devices:
                        self.weight_updates.check_awake(type(self).__name__)
                    async with self.context.generating("evaluation"):
                        sampled, _ = await run_generator(
                            self.generator, requests, self.policy_version
                        )
                    await self.context.reward_model.add_scores(sampled)
                    groups += sampled
                self.guard.check_rewards(groups)
                scoring = Scoring.of(self.cfg)
                scores = [await scoring.sampled_in_turns(group, self.tokenizer) for group in groups]
                metrics |= eval_metrics(groups, scores)
        await self.reporter.evaluated(self.global_step, groups)
        metrics["eval/version"] = float(self.policy_version)
        await notify(self, "on_evaluate", metrics)
        return metrics

    async def save_checkpoint(self, *, patient: bool = True) -> Path | None:
        """Model, optimizer, data position and versions; complete or absent.

        The folder, if there is one now: with ``ckpt_async`` it comes later, and extensions are
        notified then.
        """
        folder = await self.checkpointer.save(patient=patient)
        await self._notify_of_checkpoints()
        return folder

    async def _notify_of_checkpoints(self) -> None:
        while self.checkpointer.complete:
            await notify(self, "on_checkpoint", self.checkpointer.complete.pop(0))

    # ---------------------------------------------------------------- around the plan

    async def run(self) -> None:
        """Run the plan: start, resume, sync, evaluate, ``train``, export; flush at the end,
        whatever happened.

        Raises:
            Exception: the first error, of the plan or of a task that it has made. Trackers and
                timeline are closed then, and the run has a checkpoint if ``trainer.ckpt_on_exit``
                asks for one.
        """
        self.context.phases.plan_runs = True
        try:
            async with afterwards(self._close):
                await self._begin_run()
                steps_before = self.global_step
                async with afterwards(self._save_on_exit, grace_s=self.cfg.trainer.step_timeout_s):
                    await self._run_plan()
                await self._end_run(steps_before)
        except Exception as error:
            try:
                await notify(self, "on_failure", error)
            except Exception as another:
                error.add_note(f"and then, in on_failure: {another!r}")
            raise

    async def _run_plan(self) -> None:
        self.train_dataloader = RemainingBatches(self)
        try:
            await PlanTasks(type(self).__name__, self.context.phases).run(self.train)
            await self._end_open_step()
        except RunStopped:
            if self.context.stop_reason:
                log.info(
                    "the run ends after step %d: %s", self.global_step, self.context.stop_reason
                )

    async def _end_run(self, steps_before: int) -> None:
        context = self.context
        phases = self.context.phases
        trainer = self.cfg.trainer
        if context.stop_reason and context.run_dir is not None:
            give_reason(context.run_dir.path, f"step {self.global_step}: {context.stop_reason}")
        phases.name = "finishing"
        steps = trainer.max_training_steps
        if self.global_step < steps and not context.length.batches_left:
            log.warning(
                "the data has ended with step %d of trainer.max_training_steps=%d",
                self.global_step,
                steps,
            )
        elif self.trains_all and self.global_step < self.total_steps and not context.stop_reason:
            name = type(self).__name__
            done = self.global_step
            total = self.total_steps
            if done == steps_before:
                if trainer.epochs:
                    hint = ""
                else:
                    hint = "; a loop over trainer.epochs=0 has no pass"
                raise UserError(
                    f"{name}.train has ended without a step, and {total - done} steps are left{hint}"
                )
            log.warning(
                "%s.train has ended with step %d of %d: prompts are left", name, done, total
            )
        exports = {POLICY: trainer.export_path}
        if ROLES[CRITIC_ROLE].enabled_if(self.cfg):
            exports[CRITIC_ROLE] = trainer.critic.export_path
        if any(exports.values()):
            await self.weight_updates.offload_engines()
        for role, folder in exports.items():
            if folder:
                async with phases.limited("export"):
                    await context.dispatch.export(Path(folder), role)
        await notify(self, "on_end")
        problem = self.checkpointer.problem
        if problem:  # a run that seems well would hide it
            raise UserError(f"the run has ended, but {problem}")
        phases.name = "finished"

    async def _begin_run(self) -> None:
        phases = self.context.phases
        before_s = phases.timeline.elapsed_s()
        began_s = phases.now()
        evaluated_s = phases.evaluation_s()
        resumed = await self.checkpointer.resume()
        if self.guard.rolls_back and not resumed:
            await (
                self.save_checkpoint()
            )  # of the initial weights: the first step may be one to undo
        await self.sync_policy_weights_to_inference_engines()
        await notify(self, "on_start")
        if self.cfg.trainer.eval_before_train and not resumed:
            self.reporter.log(await self.evaluate(), 0)
        self.context.schedule.begin()
        async with phases.limited("report of the engines"):
            await self.reporter.start_clock()
        start_s = before_s + phases.now() - began_s - (phases.evaluation_s() - evaluated_s)
        await self._begin_step(self.global_step + 1)
        self.metrics["time/start_s"] = start_s

    async def _begin_step(self, step: int) -> None:
        self.context.phases.begin_step(step)
        if (
            step <= self.total_steps
        ):  # after the last step there are metrics to take, and no step begins
            await notify(self, "on_step_begin", step)

    async def _save_on_exit(self) -> None:
        """Leave a checkpoint of the last whole step, if the settings ask for it and there is none
        yet."""
        checkpointer = self.checkpointer
        phases = self.context.phases
        step = self.global_step
        phases.name = "saving"
        async with phases.limited("checkpoint"):
            await checkpointer.arrived(wait=True)
        await self._notify_of_checkpoints()
        if (
            checkpointer.saves_on_exit
            and checkpointer.between_steps
            and step > checkpointer.saved_step
        ):
            unlogged = step >= phases.step  # trained, but its end was not reached
            if unlogged:
                self.reporter.write_now(self.metrics, step)
            await self.save_checkpoint(patient=False)
            if unlogged:
                self.reporter.log(self.metrics, step)

    async def _close(self) -> None:
        try:
            await self.checkpointer.close()
            self.context.tracker.close()
        finally:
            self.context.phases.timeline.close()

    # ---------------------------------------------------------------- checks

    def _check_running(self, step: str) -> None:
        if not self.context.phases.plan_runs:
            raise UserError(
                f"{type(self).__name__}.{step} was called without run(): `await trainer.run()` starts the parts, syncs "
                f"the first weights, awaits train() and ends the run"
            )

    def check_stale(self, groups: Sequence[Group]) -> None:
        """Whether a plan that calls itself synchronous is, by the tokens' versions, if stale ones
        are not corrected.

        Raises:
            UserError: for the first batch that an older policy has sampled.
        """
        if not self.context.on_policy:
            return
        step = self.context.progress.step
        actions = (action for group in groups for t in group.trajectories for action in t.actions)
        oldest = min(
            (int(action.versions.min()) for action in actions if len(action.tokens)), default=step
        )
        if oldest < step:
            raise UserError(
                f"{type(self).__name__}.train trains samples of policy version {oldest} in step "
                f"{step + 1}, whose policy is version {step}, and trainer.algorithm."
                f"off_policy_correction=none leaves them uncorrected: choose a correction (auto, token_tis), or set "
                f"`asynchronous = True` in the class and trainer.allow_uncorrected=true"
            )

    # ---------------------------------------------------------------- what plans, hooks and
    # callbacks read

    @property
    def global_step(self) -> int:
        """Training steps done."""
        return self.context.progress.step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; while rejected prompts are replaced, the most that it can be."""
        return self.context.length.steps

    @property
    def policy_version(self) -> int:
        """The training step whose weights the engines have: the version of new tokens."""
        return self.context.progress.version

    @property
    def last_metrics(self) -> Metrics:
        """The newest value of every metric that was logged."""
        return self.reporter.last_metrics

    @property
    def callbacks(self) -> list[RunExtension]:
        """The extensions, those of the user among them; more may be appended."""
        return self.extensions

    @property
    def tracker(self) -> Tracker:
        """Receives ``log(metrics, step)``."""
        return self.context.tracker

    @property
    def run_dir(self) -> RunDirectory | None:
        """The run's folder."""
        return self.context.run_dir

    @property
    def inference_engine_client(self) -> Client:
        """The engines."""
        return self.context.client

    @property
    def dispatch(self) -> Dispatch:
        """The models that are trained or asked."""
        return self.context.dispatch

    @property
    def weight_sync(self) -> WeightSyncing:
        """How weights get to the engines."""
        return self.weight_updates.weight_sync

    def timed(
        self,
        name: str,
        into: Metrics | None = None,
        track: str = "trainer",
        step: int | None = None,
    ) -> AbstractContextManager[None]:
        """Measure a phase of a step, by default the current one: a span on the timeline and
        ``time/<name>_s``."""
        return self.context.phases.timed(name, into, track, step)

    async def waiting(self, what: str, awaitable: Awaitable[T]) -> T:
        """Await something another part does, and account for the time as idle
        (``time/wait_<what>_s``)."""
        return await self.context.phases.waiting(what, awaitable)
