"""What plans, hooks and callbacks read of a trainer.

Invariant: read-only; every number and part has its home in one of the trainer's parts, and this only points there.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from skyasync.callbacks import TrainerCallback
from skyasync.observe.progress import Sample
from skyasync.observe.run_dir import RunDirectory
from skyasync.training.handover import HandOver
from skyasync.training.learner import Learner
from skyasync.training.length import RunLength
from skyasync.training.phases import Metrics, Phases
from skyasync.training.progress import Progress
from skyasync.training.reporting import Reporting

if TYPE_CHECKING:
    from skyasync.algorithms.kl import AdaptiveKLController, FixedKLController
    from skyasync.observe.trackers import Tracker
    from skyasync.training.handover import WeightSyncing  # torch is imported when training starts
    from skyasync.workers.protocol import WorkerDispatch

T = TypeVar("T")


class Views:
    """``RayPPOTrainer`` inherits it."""

    progress: Progress
    phases: Phases
    length: RunLength
    learner: Learner
    handover: HandOver
    reporting: Reporting

    @property
    def global_step(self) -> int:
        """Training steps done."""
        return self.progress.step

    @property
    def policy_version(self) -> int:
        """The training step whose weights the engines have: what they stamp tokens with."""
        return self.progress.version

    @property
    def position(self) -> int:
        """All prompts of the stream before this one have been trained."""
        return self.progress.position

    @property
    def ahead(self) -> frozenset[int]:
        """Prompts at or behind ``position`` that have been trained too."""
        return self.progress.ahead

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; while rejected prompts are replaced, the most that it can be."""
        return self.length.steps

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.length.updates

    @property
    def metrics(self) -> Metrics:
        """Of the step in hand; a hook may add to them."""
        return self.phases.metrics

    @property
    def last_sample(self) -> Sample | None:
        """The newest trajectory that was written down, in short."""
        return self.reporting.last_sample

    @property
    def last_metrics(self) -> Metrics:
        """The newest value of every metric that was logged."""
        return self.reporting.last_metrics

    @property
    def phase_name(self) -> str:
        """What the run is doing, in a word."""
        return self.phases.name

    @property
    def callbacks(self) -> list[TrainerCallback]:
        """Told of what happens; more may be appended."""
        return self.reporting.callbacks

    @property
    def tracker(self) -> Tracker:
        """Receives ``log(metrics, step)``."""
        return self.reporting.tracker

    @property
    def run_dir(self) -> RunDirectory | None:
        """The run's folder."""
        return self.reporting.run_dir

    @property
    def dispatch(self) -> WorkerDispatch:
        """The models that are trained or asked."""
        return self.learner.dispatch

    @property
    def weight_sync(self) -> WeightSyncing:
        """The way of the weights to the engines."""
        return self.handover.weight_sync

    @property
    def kl_controller(self) -> AdaptiveKLController | FixedKLController:
        """The coefficient of the KL penalty."""
        return self.learner.kl_controller

    def timed(
        self, name: str, into: Metrics | None = None, track: str = "trainer", step: int | None = None
    ) -> AbstractContextManager[None]:
        """Measure a phase of a step, by default the one in hand: a span on the timeline and ``time/<name>_s``."""
        return self.phases.timed(name, into, track, step)

    async def waiting(self, what: str, awaitable: Awaitable[T]) -> T:
        """Await something another part does, and account for the time as idle (``time/wait_<what>_s``)."""
        return await self.phases.waiting(what, awaitable)
