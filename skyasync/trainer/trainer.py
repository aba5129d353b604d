"""The synchronous plan, and every step that plans are made of.

Invariant: a step is complete in itself (metrics, timeline, errors), so a plan is only the order in
which steps run and who waits for whom. This file imports neither Ray nor an engine: it receives its
components, and the event loop is its clock. So it runs on a cluster, in one process and in
simulation.

    generate ──▶ train_on ──────────────────▶ sync_policy_weights_... ──▶ end_step
                 prepare, forward_backward,                               evaluate, save, log
                 optimizer_step, finish_step
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
from skyasync.trainer.context import Client, Metrics, RunContext, TrainerArguments
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

if TYPE_CHECKING:  # torch is imported when training starts: settings are checked without it
    from skyasync.models.batch import TrainingBatch
    from skyasync.workers.dispatch import Dispatch

T = TypeVar("T")

log = logging.getLogger(__name__)


class RemainingBatches:
    """The batches that are left to train. Their number is fixed when the object is made."""

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

    #: Groups are trained before their batch is complete: no setting may depend on the whole batch.
    streams: bool = False
    #: Samples may come from an older policy than the one they train: a correction is needed.
    asynchronous: bool = False
    #: Engines that compute on the policy's devices between its training steps, with requests in
    #: flight: "all" of them, or "hybrid" ones next to others.
    shares_devices: str = ""
    #: ``train`` ends with the last prompt. If it ends earlier, a warning says so.
    trains_all: ClassVar[bool] = True
    #: Keys that ``train`` reads and other plans do not. A key that the chosen plan does not read is
    #: an error.
    reads: ClassVar[tuple[str, ...]] = ()

    train_dataloader: RemainingBatches
    """The batches of a ``train`` in the form that SkyRL's tutorial prints."""

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
        # Between ``_run_generate_loop`` and the train loop.
        self.generation_ack = asyncio.Event()
        """Set by ``_run_generate_loop`` when the engines are idle: a batch has been generated, or
        none is left."""
        self.sync_finished = asyncio.Event()
        """Set by the train loop after a weight sync: the next batch may be generated."""
        self._all_generated = False
        self._open_step: Metrics | None = None  # of a step that is trained and not ended
        prompts = PromptStream.of_run(cfg, train_dataset)
        context = RunContext(cfg, prompts, tracker, inference_engine_client)
        self.context = context
        self.guard = DivergenceGuard(context)
        self.ledger = PromptLedger(context, generator)
        self.reporter = Reporter(context, tokenizer.decode if tokenizer else None)
        # The extensions are notified in this order.
        profiler = Profiler(context)
        self.extensions: list[RunExtension] = [self.ledger, profiler, self.guard, self.reporter]
        self.extensions += callbacks or ()
        plan = Plan.of(cfg, type(self))
        assert plan is not None
        control = self._new_staleness_control(plan)
        if control is not None:
            self.extensions.append(control)
        self.learner = Learner(context, self.guard, control)
        self.weight_updates = WeightUpdates(context)
        self.checkpointer = Checkpointer(context, self.learner, self.ledger, self.extensions)
        # The program has checked its settings for the plan of trainer.plan: an experiment may make
        # another.
        for problem in chain(check_streaming(cfg, plan), check_correction(cfg, plan)):
            raise UserError(problem)
        context.on_policy = not plan.stale(cfg) and not reads_behaviour(cfg.trainer.algorithm)
        best_metric = cfg.trainer.ckpt_best_metric
        if best_metric.startswith("eval/") and not self.eval_dataset:
            raise UserError(
                f"trainer.ckpt_best_metric={best_metric} needs held-out prompts: set data.val_data or data.val_sets"
            )

    def _new_staleness_control(self, plan: Plan) -> StalenessControl | None:
        trainer = self.cfg.trainer
        if trainer.staleness_control != "auto":
            return None
        lowest_bound = None
        if plan.reads("trainer.max_staleness"):
            # Admission needs slots for all batches between two weight syncs.
            lowest_bound = max(1, trainer.sync_interval - 1)
        return StalenessControl(self.context, plan.most_stale(self.cfg), lowest_bound)

    @classmethod
    def get_trainer(cls, **components: Unpack[TrainerArguments]) -> RayPPOTrainer:
        """Make a trainer from the components that ``BasePPOExp`` has built."""
        return cls(**components)

    def attach(
        self,
        dispatch: Dispatch,
        weight_sync: WeightSyncing,
        *,
        timeline: Timeline | None = None,
        run_dir: RunDirectory | None = None,
        colocation: Colocation | None = None,
    ) -> None:
        """Attach the models, the weight sync, and the folders to write to, before ``run``.

        Args:
            colocation: schedules devices that models and engines share.
        """
        self.context.dispatch = dispatch
        self.context.run_dir = run_dir
        self.weight_updates.weight_sync = weight_sync
        self.weight_updates.colocation = colocation
        self.context.phases.timeline = timeline or Timeline(None)
        folder = self.cfg.trainer.ckpt_path or (run_dir and run_dir.checkpoints)
        self.checkpointer.checkpoints = None
        if folder:
            self.checkpointer.checkpoints = Checkpoints(Path(folder), self.cfg.trainer.ckpt_keep)

    # ---------------------------------------------------------------- the plan

    async def train(self) -> None:
        """THE PLAN: the only method that another plan overrides. ``run`` awaits it."""
        for prompts in self.remaining_prompts():
            rollout = await self.generate(prompts)
            status = await self.train_on(rollout)
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)

    def stop(self, reason: str) -> None:
        """End the run after the current step, with a checkpoint and a report.

        Args:
            reason: for the run's status; of several calls the first counts.
        """
        self.context.stop_reason = self.context.stop_reason or reason

    # ---------------------------------------------------------------- loops of SkyRL's tutorial

    def _run_generate_loop(
        self, generation_buffer: asyncio.Queue[Rollout]
    ) -> Coroutine[Any, Any, None]:
        """Generate all batches that are left, ahead of training by the size of the buffer.

        It waits for space in the buffer, and for ``sync_finished``. ``train_dataloader`` has its
        batches from the call on.
        """
        batches = RemainingBatches(self)
        self.train_dataloader = batches
        self._all_generated = False

        async def generate_batches() -> None:
            for index, prompts in enumerate(batches):
                rollout = await self.generate(prompts)
                # The engines are idle until the sync: new weights generate the next batch.
                if index >= generation_buffer.maxsize:
                    self.generation_ack.set()
                    await self.sync_finished.wait()
                    self.sync_finished.clear()
                await generation_buffer.put(rollout)
            self._all_generated = True
            self.generation_ack.set()

        return generate_batches()

    async def _run_training(self, generation_buffer: asyncio.Queue[Rollout]) -> Metrics:
        """Train the next batch of the buffer.

        Its step ends with ``end_step``: the plan calls it, or the next call of this method does.
        """
        await self._end_open_step()
        # Rejected prompts leave fewer batches than there seemed to be.
        if self.global_step >= self.total_steps:
            raise RunStopped
        rollout = await self.waiting("data", generation_buffer.get())
        self._open_step = await self.train_on(rollout)
        return dict(self._open_step)

    async def _end_open_step(self) -> None:
        if self._open_step is not None:
            await self.end_step(self._open_step)

    # ---------------------------------------------------------------- generation

    def remaining_prompts(self) -> Iterator[PromptBatch]:
        """The batches that have not been trained.

        With ``dynamic_sampling.mode=refill``, ``generate`` takes prompts between two batches.
        """
        progress = self.context.progress
        cursor = self.context.prompts.cursor(progress.position, progress.trained_early)
        self.context.refill.cursor = cursor
        for _ in range(self.total_steps - self.global_step):
            batch = cursor.take(self.cfg.trainer.train_batch_size)
            if not batch.prompts:
                return
            yield batch

    async def generate(self, prompts: PromptBatch) -> Rollout:
        """Generate the groups of a batch; each token has the policy version that computed it."""
        self._check_running("generate")
        refill = self.context.refill
        # The step that will train these prompts, for the timeline.
        untrained_prompts = 1 + max(prompts.positions, default=-1) - self.context.progress.position
        step = self.global_step + ceil(untrained_prompts / self.cfg.trainer.train_batch_size)
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
        """Generate the groups of some prompts: a part of ``generate``, for plans that stream.

        Args:
            step: the one that will train them, for the timeline; by default the current one.
        """
        metrics: Metrics = {}
        phases = self.context.phases
        async with self.weight_updates.gate.entered():
            version = self.policy_version
            evaluation_s = phases.evaluation_s()
            with self.timed("generate", metrics, "rollout", step):
                # Groups that a checkpoint had are not generated again.
                restored_groups = self.ledger.start(prompts, version)
                new_prompts = [prompt for prompt in prompts if prompt.id not in restored_groups]
                groups, generator_metrics = await self._generate_and_score(new_prompts, version)
                if groups:
                    await notify(self, "on_rollout", groups)
                if restored_groups:
                    by_prompt = restored_groups | {group.prompt.id: group for group in groups}
                    groups = [by_prompt[prompt.id] for prompt in prompts]
            in_evaluation = phases.evaluation_s() > evaluation_s
            metrics["rollout/in_evaluation"] = float(in_evaluation)
        if self.context.refill.active:  # its filters see the groups as they are trained
            groups = list(self.postprocess_generator_output(groups))
        return groups, metrics | generator_metrics

    async def _generate_and_score(
        self, prompts: Sequence[Prompt], version: int
    ) -> tuple[list[Group], Metrics]:
        """The generator's groups and metrics, with the reward model's scores in the rewards."""
        scorer = self.context.reward_model
        if not self.shares_devices:  # plans that share devices let requests wait for the engines
            self.weight_updates.check_awake(type(self).__name__)
        if scorer.overlaps and len(prompts) > 1 and hands_over_trajectories(self.generator):
            # Prompt by prompt: a later one may begin under a newer version.
            groups = await scorer.score_while_generating(
                lambda prompt: self._run_generator([prompt], self.policy_version), prompts
            )
            return groups, {}
        groups, metrics = await self._run_generator(prompts, version)
        await scorer.add_scores(groups)
        return groups, metrics

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
        """Make the batch of a step from finished groups.

        Args:
            metrics: of the rollouts; those of all groups, also the ``rejected``, are added.
            positions: of the prompts of all groups, in the stream.
            postprocessed: ``postprocess_generator_output`` has been called with the groups.
        """
        refill = self.context.refill
        if not refill.active and not postprocessed:
            groups = list(self.postprocess_generator_output(groups))
        sampled_groups = [*groups, *rejected]
        metrics = self.reporter.rolled_out(sampled_groups) | metrics
        check_given_up(sampled_groups, self.cfg.environment.max_given_up)
        if refill.active:
            metrics |= refill.count(len(groups), len(rejected))
        results = []
        for group in sampled_groups:
            rewards = [trajectory.reward for trajectory in group.played]
            results.append((group.prompt, rewards))
        return Rollout(groups, positions, metrics, [group.prompt.id for group in rejected], results)

    # ---------------------------------------------------------------- training

    async def train_on(self, rollout: Rollout) -> Metrics:
        """Train one step: advantages, then one or more updates; the policy is one step newer."""
        self._check_running("train_on")
        if self.global_step == self.context.phases.step:
            log.warning(
                "%s.train trains on without end_step: step %d is not logged, evaluated or saved",
                type(self).__name__,
                self.global_step,
            )
        with self.timed("train"):
            await self.weight_updates.offload_engines()
            self.checkpointer.between_steps = False
            await self.checkpointer.uninterrupted(self._advance(rollout))
        return self.metrics

    async def _advance(self, rollout: Rollout) -> None:
        """Train one step on a rollout and on replayed groups."""
        async with self.context.phases.limited("update"), self.keeping_bad(lambda: rollout):
            replayed_groups = self.context.replay_buffer.draw(self.global_step)
            await self.learn_from([*rollout.groups, *replayed_groups])
        await self.finish_step(rollout)

    @asynccontextmanager
    async def keeping_bad(self, rollout: Callable[[], Rollout]) -> AsyncIterator[None]:
        """Write the batch to a file if values that are not finite end the run inside the block."""
        try:
            yield
        except NonFiniteError:
            await self.reporter.keep_bad(rollout(), self.learner.update_batches)
            raise

    async def learn_from(self, groups: list[Group]) -> None:
        """Prepare a batch, then make an update of every mini-batch: the first part of a step."""
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
        """Make a training batch: filter, collate, shape rewards, score, compute advantages.

        Needs complete groups, and all of them at once if the estimator compares prompts.

        Returns:
            None if no group is worth training on.
        """
        from skyasync.rollout.collate import collate_in_turns

        self.guard.check_rewards(groups, trained=True)
        self.learner.groups += groups
        self.reporter.prepared(groups)
        self.check_stale(groups)
        groups = self._groups_to_train(groups)
        if not groups:
            return None
        sampled_batch = await self.ask_roles(await collate_in_turns(groups))
        shaped_batch = self.shape_rewards(sampled_batch)
        scored_batch = await self.learner.scored(shaped_batch)
        penalized_batch = self.apply_reward_kl_penalty(scored_batch)
        batch = with_advantages(self.compute_advantages_and_returns(penalized_batch))
        return self.add_teacher_advantages(batch)

    def _groups_to_train(self, groups: list[Group]) -> list[Group]:
        """Leave out groups without a signal, and truncated trajectories; the ledger notes why."""
        # The ledger has closed the prompts of replayed groups in the steps that sampled them.
        without_replayed = self.context.replay_buffer.without_replayed
        if not self.context.refill.active:  # which has filtered the groups as they came
            sampled_groups = groups
            groups = list(self.filter_groups(groups))
            rejected = len(sampled_groups) - len(groups)
            if rejected > 0 or self.cfg.trainer.algorithm.dynamic_sampling.type != "none":
                # Plans that stream prepare a batch in several calls.
                rejected_before = self.metrics.get("dynamic_sampling/rejected", 0.0)
                self.metrics["dynamic_sampling/rejected"] = rejected_before + rejected
            self.ledger.reject(
                without_replayed(sampled_groups), without_replayed(groups), NO_SIGNAL
            )
        ended_groups = self.drop_truncated(groups)
        self.ledger.reject(without_replayed(groups), without_replayed(ended_groups), TRUNCATED)
        return ended_groups

    async def forward_backward(self, part: TrainingBatch, *, complete: bool = True) -> None:
        """Add the gradient of a part of a prepared batch.

        Args:
            complete: the part is all that the next update trains.
        """
        await self.learner.forward_backward(part, complete=complete)

    async def optimizer_step(self) -> Metrics:
        """Change the weights by the gradient that has been added up."""
        return await self.learner.optimizer_step()

    async def finish_step(self, rollout: Rollout) -> None:
        """Count the step, and write down what the policy was trained on.

        A batch that is not finite is written to a file, and a step with a spike may be undone:
        before the engines get the weights.
        """
        context = self.context
        metrics = self.metrics
        learner = self.learner
        ledger = self.ledger
        rollout_ids = {group.prompt.id for group in rollout.groups}
        replayed_groups = [group for group in learner.groups if group.prompt.id not in rollout_ids]
        learner.groups = []
        staleness = await staleness_metrics([*rollout.groups, *replayed_groups], self.global_step)
        for name, value in (rollout.metrics | staleness).items():
            metrics.setdefault(name, value)  # metrics of a hook have precedence
        self.weight_updates.check_sampled_tokens(metrics)
        if self.guard.dropped:
            await self.reporter.keep_bad(rollout, learner.trained_batches)
            self.guard.check_dropped()
            if "policy/loss" not in metrics:
                ledger.undone = LEFT_OUT
        if self.guard.must_undo(metrics):
            await self._undo_steps()
        if not ledger.undone:
            context.replay_buffer.trained(rollout.groups, self.global_step + 1)
        context.progress.trained(rollout.positions)
        step = self.global_step
        metrics.update(context.prompts.observe(rollout.results, context.progress.position))
        if self.cfg.data.replay_groups:
            metrics["sampler/replayed"] = float(len(context.replay_buffer.replayed))
        self.checkpointer.between_steps = True
        await self.reporter.ended(step, ledger.close(rollout))
        trained_batches = learner.trained_batches
        learner.trained_batches = []
        await self.reporter.trained(step, rollout, trained_batches)
        # While the policy has its devices: engines may have them after the weight sync.
        if context.schedule.reached("export", step):
            await self._export_policy()

    async def _undo_steps(self) -> None:
        """Load the newest checkpoint, and mark the prompts of later steps as undone."""
        restored_step = await self.checkpointer.roll_back()
        self.guard.undone(restored_step)
        run_dir = self.context.run_dir
        rows = read_rows(run_dir.ledger) if run_dir is not None else []
        # Rows of later steps were written before the run was resumed.
        ledger_rows = [row for row in rows if row["step"] <= self.global_step]
        self.ledger.undo(restored_step, ledger_rows)
        self.context.replay_buffer.undo(restored_step)

    async def _export_policy(self) -> None:
        """Write the policy as a model folder into the run's folder, if there is one."""
        run_dir = self.context.run_dir
        if run_dir is None:
            return
        folder = run_dir.path / "exports" / f"step_{self.global_step:06d}"
        with self.timed("export"):
            async with self.context.phases.limited("export"):
                await self.context.dispatch.export(folder, POLICY)

    # ---------------------------------------------------------------- weight sync

    async def sync_policy_weights_to_inference_engines(self) -> None:
        """Give the newest weights to idle engines, every ``trainer.sync_interval`` steps."""
        if self.weight_updates.scheduled(final=self.global_step >= self.total_steps):
            await self.weight_updates.sync(self.global_step)
            await notify(self, "on_weight_update", self.policy_version)

    async def async_sync_policy_weights_to_inference_engines(self) -> None:
        """Give the newest weights to busy engines, every ``trainer.sync_interval`` steps.

        ``trainer.partial_rollout`` decides what becomes of their requests.
        """
        if not self.weight_updates.scheduled(final=self.global_step >= self.total_steps):
            return
        if self.cfg.trainer.partial_rollout == "wait":
            async with self.weight_updates.without_rollouts():
                await self.sync_policy_weights_to_inference_engines()
        else:
            await self.weight_updates.sync_in_flight(self.global_step)
            await notify(self, "on_weight_update", self.policy_version)

    # ---------------------------------------------------------------- end of a step

    async def end_step(self, status: Metrics) -> None:
        """Evaluate, call back, save and log, in the same way in every plan.

        A step is logged when all of it is done. Its time ends here: evaluation and checkpoint are
        not counted, and the rest is the next step's.
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
                metrics |= await self.reporter.end_interval()  # the next step's time begins
        evaluates = schedule.reached("evaluation", step) or step >= self.total_steps
        if evaluates:
            metrics |= await self.evaluate()
        await notify(self, "on_step_end", metrics)
        metrics |= await self.checkpointer.arrived()
        await self._notify_of_checkpoints()
        # After the callbacks, which may add the metric or stop the run.
        best = self.checkpointer.improves(metrics, evaluated=evaluates and bool(self.eval_dataset))
        stopped = bool(self.context.stop_reason)
        final = (step >= self.total_steps or stopped) and keeps_checkpoints(self.cfg.trainer)
        # A step that was undone is saved: a run that resumes must not train its data again.
        if schedule.reached("checkpoint", step) or best or final or UNDONE in metrics:
            self.reporter.write_now(metrics, step)
            await self.save_checkpoint()
        self.reporter.log(metrics, step)
        if stopped and step < self.total_steps:
            raise RunStopped
        await self._begin_step(step + 1)

    async def evaluate(self) -> Metrics:
        """Score the held-out prompts under the engines' policy, which no plan changes meanwhile.

        Returns:
            The evaluation's metrics, ``eval/...``; empty without held-out prompts.
        """
        metrics: Metrics = {}
        if not self.eval_dataset:
            return metrics
        self.context.phases.name = "evaluating"
        pause = self.cfg.trainer.eval_mode == "pause"
        with self.timed("eval", metrics, "evaluation"):
            # Inside, because waiting for rollouts in flight is time of the evaluation, not of the
            # step.
            async with self.weight_updates.gate.closed() if pause else nullcontext():
                groups: list[Group] = []
                for requests in eval_requests(self.eval_dataset, self.cfg):
                    if not self.shares_devices:
                        self.weight_updates.check_awake(type(self).__name__)
                    async with self.context.generating("evaluation"):
                        sampled_groups, _ = await run_generator(
                            self.generator, requests, self.policy_version
                        )
                    await self.context.reward_model.add_scores(sampled_groups)
                    groups += sampled_groups
                self.guard.check_rewards(groups)
                scoring = Scoring.of(self.cfg)
                scores = [await scoring.sampled_in_turns(group, self.tokenizer) for group in groups]
                metrics |= eval_metrics(groups, scores)
        await self.reporter.evaluated(self.global_step, groups)
        metrics["eval/version"] = float(self.policy_version)
        await notify(self, "on_evaluate", metrics)
        return metrics

    async def save_checkpoint(self, *, patient: bool = True) -> Path | None:
        """Save model, optimizer, data position and versions; the checkpoint is complete or absent.

        Args:
            patient: a disk that does not take it is a warning, up to ``trainer.ckpt_patience``
                times in a row.

        Returns:
            The folder; None with ``ckpt_async``, which writes it later and notifies extensions
            then.
        """
        folder = await self.checkpointer.save(patient=patient)
        await self._notify_of_checkpoints()
        return folder

    async def _notify_of_checkpoints(self) -> None:
        while self.checkpointer.complete:
            await notify(self, "on_checkpoint", self.checkpointer.complete.pop(0))

    # ---------------------------------------------------------------- around the plan

    async def run(self) -> None:
        """Run the plan: resume, sync, evaluate, ``train``, export, close.

        Raises:
            Exception: the first error, of the plan or of a task that it has made. Trackers and
                timeline are closed then; with ``trainer.ckpt_on_exit`` there is a checkpoint.
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
        if context.stop_reason and context.run_dir is not None:
            give_reason(context.run_dir.path, f"step {self.global_step}: {context.stop_reason}")
        context.phases.name = "finishing"
        max_steps = self.cfg.trainer.max_training_steps
        if self.global_step < max_steps and not context.length.batches_left:
            log.warning(
                "the data has ended with step %d of trainer.max_training_steps=%d",
                self.global_step,
                max_steps,
            )
        elif self.trains_all and self.global_step < self.total_steps and not context.stop_reason:
            self._report_early_end(steps_before)
        await self._export_models()
        await notify(self, "on_end")
        problem = self.checkpointer.problem
        if problem:  # a run that seems well would hide it
            raise UserError(f"the run has ended, but {problem}")
        context.phases.name = "finished"

    def _report_early_end(self, steps_before: int) -> None:
        """Warn of prompts that ``train`` has left; raises UserError if it has trained none."""
        name = type(self).__name__
        step = self.global_step
        total = self.total_steps
        if step > steps_before:
            log.warning(
                "%s.train has ended with step %d of %d: prompts are left", name, step, total
            )
            return
        hint = ""
        if not self.cfg.trainer.epochs:  # a loop in the form of other frameworks
            hint = "; a loop over trainer.epochs=0 has no pass"
        raise UserError(
            f"{name}.train has ended without a step, and {total - step} steps are left{hint}"
        )

    async def _export_models(self) -> None:
        """Write the trained models to the folders that the settings name."""
        trainer = self.cfg.trainer
        exports = {POLICY: trainer.export_path}
        if ROLES[CRITIC_ROLE].enabled_if(self.cfg):
            exports[CRITIC_ROLE] = trainer.critic.export_path
        if any(exports.values()):  # the models need their devices
            await self.weight_updates.offload_engines()
        for role, folder in exports.items():
            if folder:
                async with self.context.phases.limited("export"):
                    await self.context.dispatch.export(Path(folder), role)

    async def _begin_run(self) -> None:
        phases = self.context.phases
        startup_s = phases.timeline.elapsed_s()  # until the plan begins
        began_s = phases.now()
        evaluation_s = phases.evaluation_s()
        resumed = await self.checkpointer.resume()
        if self.guard.rolls_back and not resumed:
            await self.save_checkpoint()  # the first step may have to be undone
        await self.sync_policy_weights_to_inference_engines()
        await notify(self, "on_start")
        if self.cfg.trainer.eval_before_train and not resumed:
            self.reporter.log(await self.evaluate(), 0)
        self.context.schedule.begin()
        async with phases.limited("report of the engines"):
            await self.reporter.start_clock()
        start_s = startup_s + phases.now() - began_s - (phases.evaluation_s() - evaluation_s)
        await self._begin_step(self.global_step + 1)  # empties the metrics
        self.metrics["time/start_s"] = start_s

    async def _begin_step(self, step: int) -> None:
        # Also after the last step: later metrics must not change those that were logged.
        self.context.phases.begin_step(step)
        if step <= self.total_steps:
            await notify(self, "on_step_begin", step)

    async def _save_on_exit(self) -> None:
        """Save the last complete step, if ``trainer.ckpt_on_exit`` and no checkpoint has it yet."""
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
            is_unlogged = step >= phases.step  # trained, but its end was not reached
            if is_unlogged:
                self.reporter.write_now(self.metrics, step)
            await self.save_checkpoint(patient=False)
            if is_unlogged:
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
        """Check that a synchronous plan trains tokens of the newest policy, if nothing corrects.

        Raises:
            UserError: for the first batch that an older policy has sampled.
        """
        if not self.context.on_policy:
            return
        step = self.global_step
        oldest = step
        for group in groups:
            for trajectory in group.trajectories:
                for action in trajectory.actions:
                    if len(action.tokens):
                        oldest = min(oldest, int(action.versions.min()))
        if oldest < step:
            raise UserError(
                f"{type(self).__name__}.train trains samples of policy version {oldest} in step "
                f"{step + 1}, whose policy is version {step}, and trainer.algorithm."
                f"off_policy_correction=none leaves them uncorrected: choose a correction (auto, token_tis), or set "
                f"`asynchronous = True` in the class and trainer.allow_uncorrected=true"
            )

    # ---------------------------------------------------------------- for plans, hooks, callbacks

    @property
    def global_step(self) -> int:
        """Training steps done."""
        return self.context.progress.step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; an upper limit while rejected prompts are replaced."""
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
        """The extensions, also those of the user; more may be appended."""
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
        """The models that are trained or called."""
        return self.context.dispatch

    @property
    def weight_sync(self) -> WeightSyncing:
        """The weight sync from the policy to the engines."""
        return self.weight_updates.weight_sync

    def timed(
        self,
        name: str,
        into: Metrics | None = None,
        track: str = "trainer",
        step: int | None = None,
    ) -> AbstractContextManager[None]:
        """Measure a phase: a span on the timeline and ``time/<name>_s``.

        Args:
            into: metrics that get the time; by default those of the current step.
            step: of the span; by default the current one.
        """
        return self.context.phases.timed(name, into, track, step)

    async def waiting(self, name: str, awaitable: Awaitable[T]) -> T:
        """Await another task's work, and count the time as idle (``time/wait_<name>_s``)."""
        return await self.context.phases.waiting(name, awaitable)
