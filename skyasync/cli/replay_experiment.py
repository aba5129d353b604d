"""Runs that train again, step by step, on the recorded samples of another run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Unpack, cast

from skyasync.config.resume import Resume
from skyasync.config.schema import Config
from skyasync.data.prompts import CountedPrompts
from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.rollout.trajectory_files import RecordedStep, read
from skyasync.rollout.types import Group, Prompt
from skyasync.run.experiment import EnginelessExperiment
from skyasync.trainer import RayPPOTrainer, Rollout
from skyasync.trainer.context import Metrics, TrainerArguments
from skyasync.trainer.plans import PLANS
from skyasync.trainer.plans.streamed import Arrivals, StreamedRayPPOTrainer

log = logging.getLogger(__name__)

COMPARED = ("policy/loss", "policy/grad_norm")  # metrics that any other update would change


@dataclass
class RecordedArrivals(Arrivals):
    """The groups that the plan ``streamed`` trained together, as recorded."""

    batches: list[list[Group]] = field(default_factory=list)

    def take(self) -> list[Group]:
        """The next batch, as if its groups had just arrived."""
        groups = self.batches.pop(0)
        self.accepted += groups
        return groups

    @property
    def complete(self) -> bool:
        return not self.batches


class ReplayTrainer(RayPPOTrainer):
    """The steps of another run; mixed in before its plan, whose hooks hold.

    | who waits | for what        | woken by    |
    |-----------|-----------------|-------------|
    | ``train`` | a step's file   | a thread    |
    | ``train`` | the update      | the workers |

    Attributes:
        files: of recorded steps, in order.
        independent: the files are batches that do not follow each other.
        recorded: the folder of the run.
        final_step: the step after which the replay ends; 0 is the run's last.
        difference: the first one from the run, in words.
    """

    trains_all = False  # the run may have been ended before
    files: Sequence[Path] = ()
    independent = False
    recorded: Path | None = None
    final_step = 0
    difference = ""

    def __init__(self, *args: Any, **components: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **components)
        self.context.on_policy = False  # samples have the staleness that they had

    async def train(self) -> None:
        """Train on each recorded step in order, and report the first difference."""
        rows = read_rows(self.recorded / "metrics.jsonl") if self.recorded else []
        self._recorded_metrics: dict[int, Metrics] = {row["step"]: row for row in rows}
        for file in self.files:
            # In a thread, so that heartbeats are answered while a large file is read.
            step = await asyncio.to_thread(read, file)
            if step.step > self.global_step or self.independent:
                await self._replay(step)
        compared = f"steps up to {self.global_step}: samples, losses and gradient norms"
        log.info("replayed %s", self.difference or f"{compared} are those of {self.recorded}")

    async def _replay(self, recorded_step: RecordedStep) -> None:
        step = recorded_step.step
        if step != self.global_step + 1 and not self.independent:
            raise UserError(
                f"{self.recorded} has recorded step {step}, and step {self.global_step + 1} comes next: a replay needs "
                f"every step from the first on"
            )
        batches = self._batches(recorded_step)
        in_order = [group for batch in batches for group in batch]
        rollout = self.assemble(in_order, {}, recorded_step.positions, postprocessed=True)
        if self.streams:  # its optimizer steps depend on the batches in which groups arrived
            status = await self._train_batches(rollout, batches)
        else:
            status = await self.train_on(rollout)
        # There are no engines, but the policy's version and hooks depend on the call.
        await self.sync_policy_weights_to_inference_engines()
        self._compare(step, status)
        if step == self.final_step:
            self.stop(f"the replay ends here (--step {step})")
        await self.end_step(status)

    def _batches(self, recorded_step: RecordedStep) -> list[list[Group]]:
        """The groups of a step as they were trained together."""
        if self.independent or not recorded_step.batches:
            return [recorded_step.groups]
        by_name = {str(group.prompt.id): group for group in recorded_step.groups}
        names = sorted(chain.from_iterable(recorded_step.batches))
        one_batch = len(recorded_step.batches) == 1 or self.streams
        if names != sorted(by_name) or not one_batch:
            raise UserError(
                f"step {recorded_step.step} of {self.recorded} was trained in a way of the plan's own: on groups of other "
                f"steps, or in {len(recorded_step.batches)} parts; a replay can make steps of one part, and those of the "
                f"plan streamed"
            )
        return [[by_name[name] for name in batch] for batch in recorded_step.batches if batch]

    async def _train_batches(self, rollout: Rollout, batches: list[list[Group]]) -> Metrics:
        """Train the batches of a step in order, as the plan ``streamed`` did."""
        trainer = cast(StreamedRayPPOTrainer, self)
        trainer._arrivals = RecordedArrivals(
            in_order=False,
            started=0,
            metrics=[{}],
            batches=batches,
        )
        trainer._positions = list(rollout.positions)
        async with self.keeping_bad(trainer._rollout):
            await trainer._train_all()
        return self.metrics

    def _compare(self, step: int, metrics: Metrics) -> None:
        """Compare a step's metrics with the recorded ones, and note the first difference."""
        recorded_metrics = self._recorded_metrics.get(step, {})
        for name in COMPARED:
            if self.difference:  # later steps follow from it
                break
            if name in recorded_metrics and metrics.get(name) != recorded_metrics[name]:
                change = f"{name} was {recorded_metrics[name]!r} and is {metrics.get(name)!r}"
                self.difference = f"differently from step {step} on: {change}"
                log.warning("step %d is not as in %s: %s", step, self.recorded, change)
        metrics["replay/same"] = float(not self.difference)


def replaying(plan: str) -> type[RayPPOTrainer]:
    """The replay of a run of this plan, with its hooks."""
    return type("Replay", (ReplayTrainer, PLANS.find(plan)), {})


class ReplayExperiment(EnginelessExperiment):
    """Trains on recorded samples.

    Attributes:
        recorded: the folder of the run.
        final_step: the step after which the replay ends; 0 is the run's last.
        files: of the steps, in order.
        independent: the files are batches that do not follow each other.
    """

    recorded: ClassVar[Path | None] = None
    final_step: ClassVar[int] = 0
    files: ClassVar[tuple[Path, ...]] = ()
    independent: ClassVar[bool] = False

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        cfg.trainer.allow_uncorrected = True  # the recorded run was allowed to train so
        cfg.trainer.eval_before_train = False  # no engine could generate
        cfg.trainer.ckpt_rollouts = False
        if cfg.trainer.ckpt_best_metric.startswith("eval/"):
            cfg.trainer.ckpt_best_metric = ""
        if self.independent:
            cfg.data.replay_groups = 0
        # A checkpoint has the position in the run's own prompts.
        self._counts_prompts = not Resume.of(cfg.trainer).requested
        if self._counts_prompts:
            cfg.trainer.epochs = 1
            cfg.trainer.max_training_steps = 0
            cfg.environment.domains = {}  # rewards are recorded
        # The class's attributes are set in this process alone; the object is sent to the
        # controller's process.
        self._settings: dict[str, Any] = {
            "recorded": self.recorded,
            "final_step": self.final_step,
            "files": self.files,
            "independent": self.independent,
        }

    def get_eval_dataset(self) -> None:
        return None

    def get_train_dataset(self) -> Sequence[Prompt]:
        """Prompts in the same number as the run's, so that schedules end at the same step."""
        if not self._counts_prompts:
            return super().get_train_dataset()
        step = read(self._settings["files"][0])
        return CountedPrompts(step.total_steps * self.cfg.trainer.train_batch_size)

    def get_trainer(self, **components: Unpack[TrainerArguments]) -> RayPPOTrainer:  # type: ignore[override]
        trainer = replaying(self.cfg.trainer.plan)(**components)
        for name, value in self._settings.items():
            setattr(trainer, name, value)
        return trainer
