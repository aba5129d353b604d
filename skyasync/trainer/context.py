"""What all parts of a trainer share: settings, prompts, progress, the metrics and the time of a step.

Invariant: ``Progress`` decides what comes next. It changes at three moments only, its methods, and the trainer's steps
are what calls them. Time is the event loop's, so everything here holds in simulation too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, TypeVar

from skyasync.callbacks import RunExtension
from skyasync.config.schema import Config, TrainerConfig
from skyasync.data.prompts import PromptStream
from skyasync.observability.run_dir import RunDirectory
from skyasync.observability.timeline import Timeline
from skyasync.observability.trackers import Tracker
from skyasync.observability.usage import Engines
from skyasync.rollout.generator_api import Generator
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Prompt
from skyasync.trainer import weight_updates
from skyasync.trainer.rollouts import Refill, RewardModelScorer
from skyasync.utils.task_group import within

if TYPE_CHECKING:  # torch is imported when training starts, so that a wrong setting is refused at once
    from skyasync.workers.dispatch import Dispatch

T = TypeVar("T")
Metrics = dict[str, float]


class Client(weight_updates.Client, Engines, Protocol):
    """What a trainer asks of the engines, besides what the generator and the weight sync do."""


class Parts(TypedDict):
    """The keyword arguments of ``RayPPOTrainer.get_trainer``: what ``BasePPOExp`` builds."""

    cfg: Config
    tracker: Tracker
    tokenizer: Tokenizer
    train_dataset: Sequence[Prompt]
    inference_engine_client: Client
    generator: Generator
    colocate_pg: NotRequired[object]
    eval_dataset: NotRequired[Sequence[Prompt] | None]
    callbacks: NotRequired[Sequence[RunExtension] | None]


@dataclass
class Progress:
    """What has been trained, and what the engines compute with."""

    #: Training steps done.
    step: int = 0
    #: The step whose weights every engine has; tokens are stamped with it.
    version: int = 0
    #: All prompts of the stream before this one have been trained (or rejected).
    position: int = 0
    #: Prompts at ``position`` or after it that have been trained too: they overtook others.
    ahead: frozenset[int] = frozenset()

    def trained(self, position: int, ahead: frozenset[int]) -> None:
        """A training step has ended; the prompt stream stands there now."""
        self.step += 1
        self.position, self.ahead = position, ahead

    def synced(self) -> None:
        """Every engine computes with the newest weights."""
        self.version = self.step

    def resumed(self, step: int, position: int, ahead: Collection[int]) -> None:
        """A checkpoint has been loaded."""
        self.step, self.position, self.ahead = step, position, frozenset(ahead)


class RunLength:
    """How long a run is, in training steps and in optimizer steps: arithmetic on settings, prompts and progress.

    The learning rate goes by it, so that a schedule ends with the run even if prompts are left out.
    """

    def __init__(self, cfg: TrainerConfig, prompts: PromptStream, progress: Progress) -> None:
        self._cfg, self._prompts, self._progress = cfg, prompts, progress

    @property
    def refilling(self) -> bool:
        """Rejected groups are replaced while a batch is generated."""
        return self._cfg.algorithm.dynamic_sampling.mode == "refill"

    @property
    def prompts_left(self) -> int:
        """Batches that the prompts still make."""
        return self._prompts.steps(self._progress.position, self._progress.ahead)

    @property
    def steps(self) -> int:
        """Of the whole run. While rejected prompts are replaced this is the most that it can be."""
        done, most, left = self._progress.step, self._cfg.max_training_steps, self.prompts_left
        return done + (min(left, max(most - done, 0)) if most and self.refilling else left)

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.updates_per_batch(self._cfg.train_batch_size)

    def updates_per_batch(self, groups: int) -> int:
        """Optimizer steps on a batch of so many groups."""
        return self._cfg.update_epochs_per_batch * ceil(groups / (self._cfg.policy_mini_batch_size or groups))

    @property
    def planned_updates(self) -> int:
        """Optimizer steps before this training step as the learning rate counts them: with those that groups left out
        would have made, so that the schedule ends with the run."""
        updates = self.updates_per_batch(self._cfg.train_batch_size)
        by_steps = self._progress.step * updates
        if not self.refilling:
            return by_steps
        steps, most = self._prompts.steps(), self._cfg.max_training_steps
        total = min(steps, most or steps) * updates
        trained = self._progress.position + len(self._progress.ahead)
        return max(by_steps, trained * total // self._prompts.total)


class Every:
    """Due every so many steps, and when so many minutes have passed since the last time; 0 is never."""

    def __init__(self, steps: int, minutes: float, now: Callable[[], float]) -> None:
        self._steps, self._seconds, self._now = steps, 60 * minutes, now
        self._last: float | None = None

    def begin(self) -> None:
        """The minutes count from here."""
        self._last = self._now()

    def __call__(self, step: int) -> bool:
        """Whether it is due after this step; if so, it counts as done."""
        late = bool(self._seconds) and self._last is not None and self._now() - self._last >= self._seconds
        if not (late or (self._steps > 0 and step % self._steps == 0)):
            return False
        self.begin()
        return True


class Schedule:
    """What a run does now and then."""

    def __init__(self, cfg: TrainerConfig, now: Callable[[], float]) -> None:
        self.evaluation = Every(cfg.eval_interval, cfg.eval_minutes, now)
        self.checkpoint = Every(cfg.ckpt_interval, cfg.ckpt_minutes, now)
        self.export = Every(cfg.export_interval, 0.0, now)

    def begin(self) -> None:
        """The first step begins."""
        self.evaluation.begin()
        self.checkpoint.begin()


class Phases:
    """The phases of a step, measured and limited: each is a span on the timeline and a metric, under the same name.

    Attributes:
        name: of what the run is doing, for the terminal.
        metrics: of the current step.
        step: the current step, from 1; 0 before the first.

    Args:
        limit_s: ``trainer.step_timeout_s``.
    """

    def __init__(self, limit_s: float) -> None:
        self.name = "starting"
        self.metrics: Metrics = {}
        self.plan_runs = False  # inside of the trainer's ``running``
        self.step = 0
        self.limit_s = limit_s
        self.timeline = Timeline(None)
        self._began = 0.0
        self._under_way: set[object] = set()
        self._last_s = 0.0  # when a step was under way

    def begin_step(self, step: int) -> None:
        """From here on phases and metrics are those of this step."""
        self.metrics, self.step, self.name, self._began = {}, step, "training", self.now()

    @property
    def step_s(self) -> float:
        """Seconds since the current step began."""
        return self.now() - self._began

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around what is a step's own work."""
        this = object()
        self._under_way.add(this)
        try:
            yield
        finally:
            self._under_way.discard(this)
            self._last_s = self.now()

    def quiet_s(self) -> float:
        """Seconds since a step did something else than wait for another."""
        return 0.0 if self._under_way else self.now() - self._last_s

    async def waiting(self, what: str, awaitable: Awaitable[T]) -> T:
        """Await something another part does, and account for the time as idle (``time/wait_<what>_s``)."""
        with self._span(f"wait_{what}"):
            return await awaitable

    @contextmanager
    def timed(
        self, name: str, into: Metrics | None = None, track: str = "trainer", step: int | None = None
    ) -> Iterator[None]:
        """Measure a phase of a step, by default the current one: a span on the timeline and ``time/<name>_s``."""
        with self.under_way(), self._span(name, into, track, step):
            yield

    @contextmanager
    def _span(
        self, name: str, into: Metrics | None = None, track: str = "trainer", step: int | None = None
    ) -> Iterator[None]:
        start, metrics = self.now(), self.metrics if into is None else into
        try:
            with self.timeline.span(name, track, step=self.step if step is None else step):
                yield
        finally:
            metrics[f"time/{name}_s"] = metrics.get(f"time/{name}_s", 0.0) + self.now() - start

    @asynccontextmanager
    async def limited(self, what: str) -> AsyncIterator[None]:
        """What takes longer than ``trainer.step_timeout_s`` is ended.

        Raises:
            TimeoutError: naming the phase, the step and the key.
        """
        async with within(self.limit_s, f"the {what} of step {self.step}"):
            yield

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()


class RunContext:
    """One of a run; every part of the trainer is made with it.

    Attributes:
        dispatch: the models; set by ``RayPPOTrainer.attach``, as ``run_dir`` is.
        on_policy: the plan promises samples of the newest policy, and nothing corrects older ones.
        stop_reason: why the run ends before its last step; empty while it does not.
        supervised: the plan's ``train`` has begun.
    """

    dispatch: Dispatch

    def __init__(self, cfg: Config, prompts: PromptStream, tracker: Tracker, client: Client) -> None:
        self.cfg, self.prompts, self.tracker, self.client = cfg, prompts, tracker, client
        self.progress, self.phases = Progress(), Phases(cfg.trainer.step_timeout_s)
        self.length = RunLength(cfg.trainer, prompts, self.progress)
        self.schedule = Schedule(cfg.trainer, self.phases.now)
        self.refill, self.reward_model = Refill(self), RewardModelScorer(self)
        self.run_dir: RunDirectory | None = None
        self.on_policy = False
        self.stop_reason = ""
        self.supervised = False
