"""Runs that train again, step by step, on the recorded samples of another run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from skyasync.trainer.context import Metrics, Parts
from skyasync.trainer.plans import PLANS
from skyasync.trainer.plans.streamed import Arrivals, StreamedRayPPOTrainer

log = logging.getLogger(__name__)

COMPARED = ("policy/loss", "policy/grad_norm")


@dataclass
class RecordedArrivals(Arrivals):
    """The groups that the plan ``streamed`` trained together, as recorded."""

    batches: list[list[Group]] = field(default_factory=list)

    def take(self) -> list[Group]:
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

    def __init__(self, *args: Any, **parts: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **parts)
        self.context.on_policy = False  # samples have the staleness that they had

    async def train(self) -> None:
        if self.recorded is None:
            rows = []
        else:
            rows = read_rows(self.recorded / "metrics.jsonl")
        self._recorded_metrics: dict[int, Metrics] = {row["step"]: row for row in rows}
        for file in self.files:
            step = await asyncio.to_thread(read, file)
            if step.step > self.global_step or self.independent:
                await self._replay(step)
        same = f"steps up to {self.global_step}: samples, losses and gradient norms"
        log.info("replayed %s", self.difference or f"{same} are those of {self.recorded}")

    async def _replay(self, recorded: RecordedStep) -> None:
        step = recorded.step
        if step != self.global_step + 1 and not self.independent:
            raise UserError(
                f"{self.recorded} has recorded step {step}, and step {self.global_step + 1} comes next: a replay needs "
                f"every step from the first on"
            )
        batches = self._batches(recorded)
        in_order = [group for batch in batches for group in batch]
        rollout = self.assemble(in_order, {}, recorded.positions, postprocessed=True)
        if self.streams:
            status = await self._train_batches(rollout, batches)
        else:
            status = await self.train_on(rollout)
        await self.sync_policy_weights_to_inference_engines()
        self._compare(step, status)
        if step == self.final_step:
            self.stop(f"the replay ends here (--step {step})")
        await self.end_step(status)

    def _batches(self, recorded: RecordedStep) -> list[list[Group]]:
        """The groups of a step as they were trained together."""
        if self.independent or not recorded.batches:
            return [recorded.groups]
        by_name = {str(group.prompt.id): group for group in recorded.groups}
        trained = [name for batch in recorded.batches for name in batch]
        if sorted(trained) != sorted(by_name) or (len(recorded.batches) > 1 and not self.streams):
            raise UserError(
                f"step {recorded.step} of {self.recorded} was trained in a way of the plan's own: on groups of other "
                f"steps, or in {len(recorded.batches)} parts; a replay can make steps of one part, and those of the "
                f"plan streamed"
            )
        return [[by_name[name] for name in batch] for batch in recorded.batches if batch]

    async def _train_batches(self, rollout: Rollout, batches: list[list[Group]]) -> Metrics:
        streamed = cast(StreamedRayPPOTrainer, self)
        streamed._arrivals = RecordedArrivals(
            in_order=False, started=0, metrics=[{}], batches=batches
        )
        streamed._positions = list(rollout.positions)
        async with self.keeping_bad(streamed._rollout):
            await streamed._train_all()
        return self.metrics

    def _compare(self, step: int, metrics: Metrics) -> None:
        recorded = self._recorded_metrics.get(step, {})
        for name in COMPARED:
            if name in recorded and metrics.get(name) != recorded[name] and not self.difference:
                change = f"{name} was {recorded[name]!r} and is {metrics.get(name)!r}"
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
        cfg.trainer.allow_uncorrected = True
        cfg.trainer.eval_before_train = False
        cfg.trainer.ckpt_rollouts = False
        if cfg.trainer.ckpt_best_metric.startswith("eval/"):
            cfg.trainer.ckpt_best_metric = ""
        if self.independent:
            cfg.data.replay_groups = 0
        # Else the checkpoint is of the run's own prompts.
        self._counted = not Resume.of(cfg.trainer).requested
        if self._counted:
            cfg.trainer.epochs = 1
            cfg.trainer.max_training_steps = 0
            cfg.environment.domains = {}  # rewards are recorded
        # The class's attributes are set in this process alone; the controller's process gets the
        # object's.
        self._settings: dict[str, Any] = {
            "recorded": self.recorded,
            "final_step": self.final_step,
            "files": self.files,
            "independent": self.independent,
        }

    def get_eval_dataset(self) -> None:
        return None

    def get_train_dataset(self) -> Sequence[Prompt]:
        """As many prompts as the run had, so that schedules end at the same step."""
        if not self._counted:
            return super().get_train_dataset()
        first = read(self._settings["files"][0])
        return CountedPrompts(first.total_steps * self.cfg.trainer.train_batch_size)

    def get_trainer(self, **parts: Unpack[Parts]) -> RayPPOTrainer:  # type: ignore[override]
        trainer = replaying(self.cfg.trainer.plan)(**parts)
        for name, value in self._settings.items():
            setattr(trainer, name, value)
        return trainer
