"""The shared state of a trainer: settings, prompts, progress, and the metrics and time of a step.

Invariant: ``Progress`` decides what comes next. It changes in its three methods only, which the
trainer's steps call. Time is the event loop's, so all of this works in simulation too.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, TypeVar

from skyasync.callbacks import RunExtension
from skyasync.config.schema import Config, TrainerConfig
from skyasync.data.group_replay import SolvedGroups
from skyasync.data.prompts import PromptStream
from skyasync.inference.interface import PauseMode
from skyasync.observability.run_dir import RunDirectory
from skyasync.observability.timeline import Timeline
from skyasync.observability.trackers import Tracker
from skyasync.observability.usage import EngineStatsSource
from skyasync.rollout.generator_api import Generator
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Prompt
from skyasync.trainer.generation_limit import GenerationLimit
from skyasync.trainer.rollouts import Refill, RewardModelScorer
from skyasync.utils.task_group import within

if TYPE_CHECKING:  # torch is imported when training starts: settings are checked without it
    from skyasync.workers.dispatch import Dispatch

T = TypeVar("T")
Metrics = dict[str, float]

PLAN_CODE: ContextVar[bool] = ContextVar("PLAN_CODE", default=False)
"""Whether the code that runs is a plan's, and not of a step of the trainer (see ``plan_tasks``)."""


class Client(EngineStatsSource, Protocol):
    """The engines as the trainer calls them; generator and weight sync have other interfaces."""

    async def cut(self) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def waiting(self) -> int: ...


class TrainerArguments(TypedDict):
    """The keyword arguments of ``RayPPOTrainer.get_trainer``, which ``BasePPOExp`` builds."""

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
    """The position of training, and the policy version of the engines.

    Batches may be trained in any order: the position follows from the prompts that were trained.

    Attributes:
        step: training steps done.
        version: the step whose weights every engine has; the policy version of new tokens.
        position: all prompts of the stream before this one have been trained (or rejected).
        trained_early: positions after ``position`` that have been trained (or rejected) too: they
            overtook others.
    """

    step: int = 0
    version: int = 0
    position: int = 0
    trained_early: frozenset[int] = frozenset()

    def trained(self, positions: Iterable[int]) -> None:
        """A training step has ended; the prompts at these positions were trained or rejected."""
        self.step += 1
        early_positions = {position for position in positions if position >= self.position}
        early_positions.update(self.trained_early)
        # The position moves past prompts that are trained without a gap.
        while self.position in early_positions:
            early_positions.remove(self.position)
            self.position += 1
        self.trained_early = frozenset(early_positions)

    def synced(self) -> None:
        """Every engine computes with the newest weights."""
        self.version = self.step

    def resumed(self, step: int, position: int, trained_early: Collection[int]) -> None:
        """A checkpoint has been loaded."""
        self.step = step
        self.position = position
        self.trained_early = frozenset(trained_early)


class RunLength:
    """The length of a run in training steps and in optimizer steps.

    It follows from settings, prompts and progress alone. The learning rate goes by it, so that a
    schedule ends with the run even if prompts are left out.
    """

    def __init__(self, cfg: TrainerConfig, prompts: PromptStream, progress: Progress) -> None:
        self._cfg = cfg
        self._prompts = prompts
        self._progress = progress
        self._refills = cfg.algorithm.dynamic_sampling.mode == "refill"

    @property
    def batches_left(self) -> int:
        """Batches that the remaining prompts make."""
        return self._prompts.steps(self._progress.position, self._progress.trained_early)

    @property
    def steps(self) -> int:
        """Steps of the whole run; an upper limit while rejected prompts are replaced."""
        steps_done = self._progress.step
        limit = self._cfg.max_training_steps
        steps_left = self.batches_left
        # A run that replaces rejected prompts may end by its steps, with prompts left over.
        if limit and self._refills:
            steps_left = min(steps_left, max(limit - steps_done, 0))
        return steps_done + steps_left

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.updates_per_batch(self._cfg.train_batch_size)

    def updates_per_batch(self, groups: int) -> int:
        """Optimizer steps on a batch of so many groups."""
        mini_batch_size = self._cfg.policy_mini_batch_size or groups
        return self._cfg.update_epochs_per_batch * ceil(groups / mini_batch_size)

    @property
    def planned_updates(self) -> int:
        """Optimizer steps before this training step, as the learning rate counts them.

        Rejected groups count as if they had been trained, so that the schedule ends with the run.
        """
        updates = self.updates_per_batch(self._cfg.train_batch_size)
        by_steps = self._progress.step * updates
        if not self._refills:
            return by_steps
        steps = self._prompts.steps()
        limit = self._cfg.max_training_steps or steps
        planned_updates = min(steps, limit) * updates
        # By the fraction of the prompts that were trained or rejected.
        consumed_prompts = self._progress.position + len(self._progress.trained_early)
        return max(by_steps, consumed_prompts * planned_updates // self._prompts.total)


class Schedule:
    """The steps after which a run evaluates, saves and exports.

    Each event happens every so many steps, or minutes since its last time; 0 is never.
    """

    def __init__(self, cfg: TrainerConfig, now: Callable[[], float]) -> None:
        self._now = now
        # Event -> steps, seconds.
        self._intervals = {
            "evaluation": (cfg.eval_interval, 60 * cfg.eval_minutes),
            "checkpoint": (cfg.ckpt_interval, 60 * cfg.ckpt_minutes),
            "export": (cfg.export_interval, 0.0),
        }
        self._event_s: dict[str, float] = {}  # the last time of each event

    def begin(self) -> None:
        """The first step begins: minutes count from here."""
        self._event_s = dict.fromkeys(self._intervals, self._now())

    def reached(self, event: str, step: int) -> bool:
        """Whether an event happens after this step; if so, it counts as done."""
        steps, seconds = self._intervals[event]
        by_steps = steps > 0 and step % steps == 0
        by_time = False
        if seconds > 0 and event in self._event_s:
            by_time = self._now() - self._event_s[event] >= seconds
        if not (by_steps or by_time):
            return False
        self._event_s[event] = self._now()
        return True


#: Phases between two steps: ``time/step_s`` leaves them out.
BETWEEN_STEPS = ("eval", "checkpoint", "export")


class Phases:
    """The phases of a step, measured and limited.

    Each is a span on the timeline and a metric, under the same name.

    Attributes:
        name: the current phase, for the terminal.
        metrics: of the current step.
        step: the current step, from 1; 0 before the first.
        between_steps_s: seconds of evaluation, checkpoints and exports so far.
        plan_runs: whether the trainer's ``run`` is awaited.
        stall_s: a plan that waits for so long while no step is under way is ended with an error.

    Args:
        limit_s: ``trainer.step_timeout_s``.
    """

    def __init__(self, limit_s: float) -> None:
        self.name = "starting"
        self.metrics: Metrics = {}
        self.plan_runs = False
        self.step = 0
        self.between_steps_s = 0.0
        self.limit_s = limit_s
        self.stall_s = limit_s
        self.timeline = Timeline(None)
        self._weights: dict[str, float] = {}  # of the metrics that ``mean`` adds to
        self._active_blocks: set[object] = set()  # of ``under_way``
        self._active_until_s = 0.0  # end of the latest block
        self._open_phases: set[str] = set()  # of ``BETWEEN_STEPS``
        self._evaluation_s = 0.0  # of evaluations that have ended
        self._evaluation_began_s = 0.0

    def begin_step(self, step: int) -> None:
        """Begin a step: phases and metrics are those of this step from here on."""
        self.metrics = {}
        self.step = step
        self.name = "training"
        self._weights = {}

    def evaluation_s(self) -> float:
        """Seconds of evaluation so far, also of one that is not over."""
        if "eval" in self._open_phases:
            return self._evaluation_s + (self.now() - self._evaluation_began_s)
        return self._evaluation_s

    def mean(self, name: str, value: float, weight: float) -> None:
        """Add a metric of a part of the step's batch: the step's metric is the weighted mean."""
        total = self._weights.get(name, 0.0) + weight
        self._weights[name] = total
        previous = self.metrics.get(name, value)
        fraction = weight / total if total else 0.0
        self.metrics[name] = previous + (value - previous) * fraction

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Mark a block as work of the trainer's steps; tasks that it makes are not the plan's."""
        block = object()
        self._active_blocks.add(block)
        plan_code = PLAN_CODE.get()
        PLAN_CODE.set(False)
        try:
            yield
        finally:
            PLAN_CODE.set(plan_code)
            self._active_blocks.discard(block)
            self._active_until_s = self.now()

    def idle_s(self) -> float:
        """Seconds since a step did something else than wait for another."""
        if self._active_blocks:
            return 0.0
        return self.now() - self._active_until_s

    async def waiting(self, name: str, awaitable: Awaitable[T]) -> T:
        """Await another task's work, and count the time as idle (``time/wait_<name>_s``)."""
        with self._span(f"wait_{name}"):
            return await awaitable

    @contextmanager
    def timed(
        self,
        name: str,
        into: Metrics | None = None,
        track: str = "trainer",
        step: int | None = None,
    ) -> Iterator[None]:
        """Measure a phase: a span on the timeline and ``time/<name>_s``.

        Args:
            into: metrics that get the time; by default those of the current step.
            track: of the timeline.
            step: of the span; by default the current one.
        """
        with self.under_way(), self._span(name, into, track, step):
            yield

    @contextmanager
    def _span(
        self,
        name: str,
        into: Metrics | None = None,
        track: str = "trainer",
        step: int | None = None,
    ) -> Iterator[None]:
        # Both are those of the beginning: a step may end inside of a rollout's span.
        metrics = self.metrics if into is None else into
        span_step = self.step if step is None else step
        began_s = self.now()
        between_steps_s = self.between_steps_s
        outermost = name in BETWEEN_STEPS and not self._open_phases
        if outermost:
            self._open_phases.add(name)
        if outermost and name == "eval":
            self._evaluation_began_s = began_s
        try:
            with self.timeline.span(name, track, step=span_step):
                yield
        finally:
            seconds = self.now() - began_s
            if outermost:
                self._open_phases.discard(name)
                self.between_steps_s += seconds
                if name == "eval":
                    self._evaluation_s += seconds
            elif track == "trainer":
                # An export is between two steps, and happens inside of ``train``.
                seconds -= self.between_steps_s - between_steps_s
            metric = f"time/{name}_s"
            metrics[metric] = metrics.get(metric, 0.0) + seconds

    @asynccontextmanager
    async def limited(self, phase: str) -> AsyncIterator[None]:
        """End a block that takes longer than ``trainer.step_timeout_s``.

        Raises:
            TimeoutError: naming phase, step and key.
        """
        with self.under_way():
            async with within(self.limit_s, f"the {phase} of step {self.step}"):
                yield

    @staticmethod
    def now() -> float:
        """Seconds on the clock of the event loop."""
        return asyncio.get_running_loop().time()


class RunContext:
    """The shared state of one run, with which all components of the trainer are made.

    Attributes:
        dispatch: the models; set by ``RayPPOTrainer.attach``, as ``run_dir`` is.
        on_policy: the plan promises samples of the newest policy, and nothing corrects older ones.
        stop_reason: why the run ends before its last step; empty while it does not.
    """

    dispatch: Dispatch

    def __init__(
        self, cfg: Config, prompts: PromptStream, tracker: Tracker, client: Client
    ) -> None:
        self.cfg = cfg
        self.prompts = prompts
        self.tracker = tracker
        self.client = client
        self.progress = Progress()
        self.phases = Phases(cfg.trainer.step_timeout_s)
        self.generation_limit = GenerationLimit(cfg.trainer.step_timeout_s, client)
        self.length = RunLength(cfg.trainer, prompts, self.progress)
        self.schedule = Schedule(cfg.trainer, self.phases.now)
        self.refill = Refill(cfg.trainer)
        self.reward_model = RewardModelScorer(self)
        self.replay_buffer = SolvedGroups(cfg.data)
        self.run_dir: RunDirectory | None = None
        self.on_policy = False
        self.stop_reason = ""

    @asynccontextmanager
    async def generating(self, phase: str) -> AsyncIterator[None]:
        """Limit a block as ``Phases.limited``; time in which engines generate does not count."""
        with self.phases.under_way():
            async with self.generation_limit.limited(f"the {phase} of step {self.phases.step}"):
                yield
