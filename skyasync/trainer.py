"""The synchronous plan, and every step that plans are made of.

Invariant: a step is complete in itself (metrics, timeline, errors), so a plan is only the order in which
steps run and who waits for whom. This file knows neither Ray nor an engine: it is handed its parts, and
takes its time from the event loop, so it runs on a cluster, in one process and on virtual time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Unpack

from skyasync.callbacks import TrainerCallback
from skyasync.config.resume import keeps_checkpoints
from skyasync.config.rules import Plan, check_correction, corrected
from skyasync.config.schema import Config
from skyasync.config.streaming import check_streaming
from skyasync.data.prompts import PromptBatch, PromptStream
from skyasync.errors import NonFiniteError, UserError
from skyasync.observe.jsonl import read_rows
from skyasync.observe.run_dir import RunDirectory
from skyasync.observe.timeline import Timeline
from skyasync.observe.trackers import Tracker
from skyasync.rollout.contract import Generator, hands_over_trajectories, play
from skyasync.rollout.evaluation import Scoring, eval_metrics, eval_requests
from skyasync.rollout.metrics import staleness_metrics
from skyasync.rollout.requests import eval_prompts, request_for
from skyasync.rollout.rules import check_given_up
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Group, Prompt, Rollout
from skyasync.state.checkpoint import Checkpoints
from skyasync.training.bookkeeping import DULL, TRUNCATED, Bookkeeping
from skyasync.training.cadence import Cadence
from skyasync.training.handover import HandOver, WeightSyncing
from skyasync.training.judging import Judging
from skyasync.training.learner import Learner
from skyasync.training.length import RunLength
from skyasync.training.life import Life
from skyasync.training.marks import Marks
from skyasync.training.parts import Client, Parts
from skyasync.training.phases import Metrics, Phases
from skyasync.training.profiling import Profiling
from skyasync.training.progress import Progress
from skyasync.training.refill import Refill
from skyasync.training.reporting import Reporting
from skyasync.training.saving import Saving
from skyasync.training.stages import with_advantages
from skyasync.weight_sync.colocation import Colocation

if TYPE_CHECKING:  # torch is imported when training starts, so that a wrong setting is refused at once
    from skyasync.workers.batch import TrainingBatch
    from skyasync.workers.protocol import WorkerDispatch


class RayPPOTrainer(Life):
    """Generate, train, sync, one after the other: every sample is from the newest policy.

    | who waits      | for what                      | woken by                          |
    |----------------|-------------------------------|-----------------------------------|
    | ``train``      | the trajectories of this step | the generator (engines)           |
    | ``train``      | the update                    | the workers                       |
    | ``train``      | the weights in every engine   | the weight sync                   |

    Subclass it and override a hook (``postprocess_generator_output``, ``filter_groups``,
    ``apply_reward_kl_penalty``, ``compute_advantages_and_returns``) to change the algorithm, or ``train`` to
    change the plan. Hooks combine with every plan by inheritance. What the steps need is held by parts, one for
    each concern (``progress``, ``phases``, ``learner``, ``handover``, ``refill``, ``book``, ``saving``, ``reporting``).

    Args:
        cfg: a ``skyasync.config.Config``.
        tracker: receives ``log(metrics, step)``.
        train_dataset: prompts; see ``skyasync.data.prompts``.
        colocate_pg: what ``BasePPOExp.get_colocate_pg`` gave: the devices of all parts. Kept for experiments that pass
            it on, and read by none of the steps.
        generator: anything with ``async generate(GeneratorInput) -> GeneratorOutput``; a ``TrajectoryGenerator``
            hands over trajectories, without lists in between.

    Raises:
        UserError: if the plan is asynchronous and nothing corrects for stale samples.
    """

    #: Groups are trained before their batch is complete: nothing may depend on the whole batch.
    streams: bool = False
    #: Samples may come from an older policy than the one they train: a correction is needed.
    asynchronous: bool = False
    #: Keys that ``train`` reads and other plans do not; a key that the chosen plan does not read is refused.
    reads: ClassVar[tuple[str, ...]] = ()

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
        callbacks: Sequence[TrainerCallback] | None = None,
    ) -> None:
        self.cfg, self.tokenizer, self.colocate_pg = cfg, tokenizer, colocate_pg
        self.inference_engine_client, self.generator = inference_engine_client, generator
        self.eval_dataset = eval_prompts(eval_dataset or [])
        self.prompts = PromptStream.of_run(cfg, train_dataset)
        self.progress, self.phases = Progress(), Phases(cfg.trainer.step_timeout_s)
        self.length = RunLength(cfg, self.prompts, self.progress)
        self.learner = Learner(cfg, self.progress, self.phases, self.length)
        self.judging = Judging(cfg, self.phases, self.learner)
        self.handover = HandOver(cfg, inference_engine_client, self.progress, self.phases)
        self.refill = Refill(cfg, self.length)
        self.book = Bookkeeping(cfg, self.prompts, generator)
        self.saving = Saving(cfg, self.prompts, self.progress, self.phases, self.learner, self.book)
        self.marks = Marks(
            cfg, inference_engine_client, self.progress, self.phases, self.learner, self.book, self.saving
        )
        self.cadence, self.profiling = Cadence(cfg.trainer, self.phases.now), Profiling(cfg.trainer.profile_steps)
        self.reporting = Reporting(
            tracker, callbacks, cfg.trainer.save_samples, trajectories=cfg.trainer.dump_trajectories
        )
        self._learnt: list[Group] = []  # since the last step's end; of other rollouts too, where a plan replays
        self._refuse_what_cannot_work()

    @classmethod
    def get_trainer(cls, **parts: Unpack[Parts]) -> RayPPOTrainer:
        """Make a trainer from the parts that ``BasePPOExp`` has built."""
        return cls(**parts)

    def attach(
        self,
        dispatch: WorkerDispatch,
        weight_sync: WeightSyncing,
        *,
        timeline: Timeline | None = None,
        run_dir: RunDirectory | None = None,
        turns: Colocation | None = None,
    ) -> None:
        """Hand over what the steps work with: the models, the way to the engines, and where to write.

        Args:
            turns: whose turn it is on devices that models and engines share.
        """
        self.learner.dispatch, self.handover.weight_sync, self.handover.turns = dispatch, weight_sync, turns
        self.reporting.run_dir, self.phases.timeline = run_dir, timeline or Timeline(None)
        folder = self.cfg.trainer.ckpt_path or (run_dir and run_dir.checkpoints)
        self.saving.checkpoints = Checkpoints(Path(folder), self.cfg.trainer.ckpt_keep) if folder else None

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

    def remaining_prompts(self) -> Iterator[PromptBatch]:
        """The batches that have not been trained; ``generate`` may take prompts between two of them."""
        cursor = self.refill.cursor = self.prompts.cursor(self.position, self.ahead)
        for _ in range(self.total_steps - self.global_step):
            batch = cursor.take(self.cfg.trainer.train_batch_size)
            if not batch.prompts:
                return
            yield batch

    async def generate(self, prompts: PromptBatch) -> Rollout:
        """Prompts to groups of trajectories, stamped with the versions that computed them."""
        self._check_running("generate")
        left = prompts.position - self.position  # in the stream, up to and with this batch
        step = self.global_step - (-left // self.cfg.trainer.train_batch_size)
        if not self.refill.active:
            return self.assemble(*await self.roll_out(prompts.prompts, step), prompts.position, prompts.ahead)
        kept, rejected, metrics, last = await self.refill.fill(prompts, step, self.roll_out, self.filter_groups)
        return self.assemble(kept, metrics, last.position, last.ahead, rejected)

    async def roll_out(self, prompts: Sequence[Prompt], step: int | None = None) -> tuple[list[Group], Metrics]:
        """The episodes of some prompts as the generator gives them: a part of ``generate``, for plans that stream."""
        metrics: Metrics = {}
        found: Metrics = {}
        async with self.handover.rollout():
            version = self.policy_version
            with self.timed("generate", metrics, "rollout", step):
                had = self.book.start(prompts, version)  # in the checkpoint
                left = [prompt for prompt in prompts if prompt.id not in had]
                request = request_for(left, self.cfg.generator)
                self.handover.check_awake(type(self).__name__)
                if self.judging.apart and len(left) > 1 and hands_over_trajectories(self.generator):
                    groups = await self.judging.while_playing(self._play_one, left)
                else:
                    async with self.phases.limited("generation"):
                        groups, found = await play(self.generator, request, left, version)
                    await self.judging.add_scores(groups)
                self.book.finish(groups)
                if had:
                    known = had | {group.prompt.id: group for group in groups}
                    groups = [known[prompt.id] for prompt in prompts]
        if self.refill.active:  # what is worth keeping is decided by what will be trained
            groups = self.postprocess_generator_output(groups)
        return groups, metrics | found

    async def _play_one(self, prompt: Prompt) -> list[Group]:
        async with self.phases.limited("generation"):
            request = request_for([prompt], self.cfg.generator)
            groups, _ = await play(self.generator, request, [prompt], self.policy_version)
        return groups

    def assemble(
        self,
        groups: list[Group],
        metrics: Metrics,
        position: int,
        ahead: frozenset[int],
        rejected: Sequence[Group] = (),
        *,
        postprocessed: bool = False,
    ) -> Rollout:
        """What has been rolled out, as the batch of a step. Metrics are of all groups, those ``rejected`` as well."""
        if not self.refill.active and not postprocessed:
            groups = self.postprocess_generator_output(groups)
        found = self.reporting.rolled_out([*groups, *rejected]) | metrics
        check_given_up([*groups, *rejected], self.cfg.environment.max_given_up)
        if self.refill.active:
            found |= self.refill.count(len(groups), len(rejected))
        return Rollout(groups, position, found, ahead, [group.prompt.id for group in rejected])

    async def train_on(self, rollout: Rollout) -> Metrics:
        """Groups to advantages to one or more updates; the policy is then one step newer."""
        self._check_running("train_on")
        with self.timed("train"):
            await self.handover.make_way_for_training()
            self.saving.step_begun()
            await self.saving.uninterrupted(self._advance(rollout))
        return self.metrics

    async def _advance(self, rollout: Rollout) -> None:
        """What is not cut in two: weights and position belong together."""
        async with self.phases.limited("update"), self.keeping_bad(lambda: rollout):
            await self.learn_from(rollout.groups)
        await self.finish_step(rollout)

    @asynccontextmanager
    async def keeping_bad(self, rollout: Callable[[], Rollout]) -> AsyncIterator[None]:
        """Around updates: a batch that ends the run, since something in it is not finite, is written down."""
        try:
            yield
        except NonFiniteError:
            await self.reporting.keep_bad(self.phases.step, self.total_steps, rollout(), self.learner.parts)
            raise

    async def learn_from(self, groups: list[Group]) -> None:
        """The part of ``train_on`` that changes the weights: prepare, then mini-batch by mini-batch."""
        batch, trainer = await self.prepare(groups), self.cfg.trainer
        if batch is None:
            return
        with self.timed("update"):
            for _ in range(trainer.update_epochs_per_batch):
                for part, _ in batch.mini_batches(trainer.policy_mini_batch_size):
                    await self.forward_backward(part)
                    await self.optimizer_step()
        self.metrics.update(self.learner.finish(batch))

    async def prepare(self, groups: list[Group]) -> TrainingBatch | None:
        """Filter, shape, collate; log-probabilities, KL, advantages. None if no group is worth training on.

        Needs whole groups, and all of them at once where the estimator compares prompts.
        """
        from skyasync.rollout.collate import collate_in_turns

        self.learner.numbers.look_at(groups)
        self._learnt += groups
        self.check_stale(groups)
        if not self.refill.active:  # else they were filtered as they came
            sampled = groups
            groups = self.filter_groups(groups)
            self.learner.count_rejected(len(sampled) - len(groups))
            self.book.reject(sampled, groups, DULL)
        whole, groups = groups, self.drop_truncated(groups)
        self.book.reject(whole, groups, TRUNCATED)
        if not groups:
            return None
        batch = self.shape_rewards(await self.ask_roles(await collate_in_turns(groups)))
        scored = self.apply_reward_kl_penalty(await self.learner.scored(batch))
        return self.add_teacher_advantages(with_advantages(self.compute_advantages_and_returns(scored)))

    async def forward_backward(self, part: TrainingBatch, *, complete: bool = True) -> None:
        """Add the gradient of a part of a prepared batch; ``complete``: it is all that the next update trains."""
        await self.learner.forward_backward(part, complete=complete)

    async def optimizer_step(self) -> Metrics:
        """Change the weights by the gradient that has been added up."""
        return await self.learner.optimizer_step()

    async def finish_step(self, rollout: Rollout) -> None:
        """The policy is one step newer: count it, and write down what it was trained on."""
        own = {group.prompt.id for group in rollout.groups}
        again = [group for group in self._learnt if group.prompt.id not in own]
        self._learnt = []
        staleness = await staleness_metrics([*rollout.groups, *again], self.global_step)
        for name, value in (rollout.metrics | staleness).items():
            self.metrics.setdefault(name, value)  # what a hook has found stands
        self.handover.look_at_tokens(self.metrics)
        await self._judge_numbers(rollout)
        self.progress.trained(rollout.position, rollout.ahead)
        self.saving.step_done()
        await self.reporting.ended(self.global_step, self.book.close(rollout))
        decode, step = self.tokenizer.decode if self.tokenizer else None, self.global_step
        await self.reporting.trained(step, self.total_steps, rollout, decode, self.learner.take_trained())
        if self.cadence.export(step) and self.run_dir is not None:  # now that the policy has its devices
            with self.timed("export"):
                await self._export(self.run_dir.path / "exports" / f"step_{step:06d}")

    async def _judge_numbers(self, rollout: Rollout) -> None:
        """Before engines get the weights: what was left out is kept, and what went too far may be undone."""
        numbers = self.learner.numbers
        if numbers.dropped:
            await self.reporting.keep_bad(self.phases.step, self.total_steps, rollout, self.learner.trained)
            numbers.check_dropped()
            if "policy/loss" not in self.metrics:
                self.book.leave_out()
        found = numbers.spikes(self.metrics)
        if found and numbers.rolls_back:
            numbers.undo(found)
            numbers.undone(step := await self.saving.roll_back())
            self.book.undo(step, read_rows(self.run_dir.ledger) if self.run_dir is not None else ())
        else:
            numbers.went_well()

    async def sync_policy_weights_to_inference_engines(self) -> None:
        """Hand the newest weights to engines that are idle, in the steps in which that is due."""
        if self.handover.due(self.global_step >= self.total_steps):
            async with self.marks.syncing(), self.handover.syncing():
                await self.weight_sync.sync(self.global_step)

    async def async_sync_policy_weights_to_inference_engines(self) -> None:
        """Hand the newest weights to engines that are busy; ``partial_rollout`` says what is in flight meanwhile."""
        if not self.handover.due(self.global_step >= self.total_steps):
            return
        if self.cfg.trainer.partial_rollout == "wait":
            async with self.handover.without_rollouts():
                await self.sync_policy_weights_to_inference_engines()
        else:
            async with self.marks.syncing(), self.handover.syncing():
                await self.weight_sync.sync(self.global_step, self.handover.engines_paused)

    async def end_step(self, status: Metrics) -> None:
        """Evaluate, call back, save, log: the same in every plan. A step is logged when all of it is done."""
        self._check_running("end_step")
        self.metrics.update(status)  # a plan's status may be a copy
        metrics, is_last = self.metrics, self.global_step >= self.total_steps
        async with self.phases.limited("report of the engines"):
            metrics |= await self.reporting.usage(self.phases.step_s)
        await self.profiling.end_step(self.dispatch)
        evaluated = self.cadence.evaluation(self.global_step) or is_last
        if evaluated:
            metrics |= await self.evaluate()
        self.learner.numbers.spikes(metrics, complete=True)
        self.reporting.tell("on_step_end", self, metrics)
        metrics |= await self.saving.arrived()
        self._tell_of_checkpoints()
        best = self.saving.improves(metrics, evaluated=evaluated and bool(self.eval_dataset))
        last, undone = is_last and keeps_checkpoints(self.cfg.trainer), self.learner.numbers.undid
        if self.cadence.checkpoint(self.global_step) or best or last or undone:
            self.reporting.keep(metrics, self.global_step)
            await self.save_checkpoint()
        self.reporting.log(metrics, self.global_step)
        await self._begin_step()

    async def evaluate(self) -> Metrics:
        """Score the held-out prompts under the engines' policy, which no plan changes meanwhile."""
        metrics: Metrics = {}
        if not self.eval_dataset:
            return metrics
        self.phases.name = "evaluating"
        pause = self.cfg.trainer.eval_mode == "pause"
        async with self.handover.without_rollouts() if pause else nullcontext():
            with self.timed("eval", metrics, "evaluation"):
                metrics |= await self._evaluation()
        metrics["eval/version"] = float(self.policy_version)
        self.reporting.tell("on_evaluate", self, metrics)
        return metrics

    async def save_checkpoint(self, *, patient: bool = True) -> Path | None:
        """Model, optimizer, data position and versions; complete or absent.

        The folder, if there is one now: with ``ckpt_async`` it comes later, and callbacks are told then.
        """
        folder = await self.saving.save(patient=patient)
        self._tell_of_checkpoints()
        return folder

    def _tell_of_checkpoints(self) -> None:
        while self.saving.complete:
            self.reporting.tell("on_checkpoint", self, self.saving.complete.pop(0))

    # ---------------------------------------------------------------- details

    def _refuse_what_cannot_work(self) -> None:
        """What the program has checked for the plan that it knew of: an experiment may make another."""
        plan = Plan.of(self.cfg, type(self))
        assert plan is not None
        for problem in chain(check_streaming(self.cfg, plan), check_correction(self.cfg, plan)):
            raise UserError(problem)
        self._on_policy = not plan.stale(self.cfg) and not corrected(self.cfg.trainer.algorithm)
        if (best := self.cfg.trainer.ckpt_best_metric).startswith("eval/") and not self.eval_dataset:
            raise UserError(
                f"trainer.ckpt_best_metric={best} needs held-out prompts: set data.val_data or data.val_sets"
            )

    def check_stale(self, groups: Sequence[Group]) -> None:
        """Whether a plan that calls itself synchronous is, by the tokens' stamps, if nothing corrects what is stale.

        Raises:
            UserError: for the first batch that an older policy has sampled.
        """
        if not self._on_policy:
            return
        actions = (action for group in groups for t in group.trajectories for action in t.actions)
        oldest = min(
            (int(action.versions.min()) for action in actions if len(action.tokens)), default=self.progress.step
        )
        if oldest < self.progress.step:
            raise UserError(
                f"{type(self).__name__}.train trains samples of policy version {oldest} in step "
                f"{self.progress.step + 1}, whose policy is version {self.progress.step}, and trainer.algorithm."
                f"off_policy_correction=none leaves them uncorrected: choose a correction (auto, token_tis), or set "
                f"`asynchronous = True` in the class and trainer.allow_uncorrected=true"
            )

    async def _evaluation(self) -> Metrics:
        groups: list[Group] = []
        for prompts, request in eval_requests(self.eval_dataset, self.cfg):
            self.handover.check_awake(type(self).__name__)
            async with self.phases.limited("evaluation"):
                found, _ = await play(self.generator, request, prompts, self.policy_version)
            await self.judging.add_scores(found)
            groups += found
        self.learner.numbers.check_rewards(groups)
        scoring = Scoring.of(self.cfg)
        numbers = [await scoring.sampled_in_turns(group, self.tokenizer) for group in groups]
        return eval_metrics(groups, numbers)
