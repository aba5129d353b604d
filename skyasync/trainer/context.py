"""The state that all parts of a trainer share: settings, prompts, progress, the metrics and the
time of a step.

Invariant: ``Progress`` decides what comes next. It changes in its three methods only, which the
trainer's steps call. Time is the event loop's, so everything here holds in simulation too.
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

if (
    TYPE_CHECKING
):  # torch is imported when training starts, so that a wrong setting is refused at once
    from skyasync.workers.dispatch import Dispatch

T = TypeVar("T")
Metrics = dict[str, float]

PLAN_CODE: ContextVar[bool] = ContextVar("PLAN_CODE", default=False)
"""Whether the code that runs is a plan's, and not of a step of the trainer (see ``plan_tasks``)."""


class Client(EngineStatsSource, Protocol):
    """The engines as the trainer uses them; generator and weight sync have interfaces of their
    own."""

    async def cut(self) -> None: ...
    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...
    async def waiting(self) -> int: ...


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
        early = {position for position in positions if position >= self.position}
        early.update(self.trained_early)
        while self.position in early:
            early.remove(self.position)
            self.position += 1
        self.trained_early = frozenset(early)

    def synced(self) -> None:
        """Every engine computes with the newest weights."""
        self.version = self.step

    def resumed(self, step: int, position: int, trained_early: Collection[int]) -> None:
        """A checkpoint has been loaded."""
        self.step = step
        self.position = position
        self.trained_early = frozenset(trained_early)


class RunLength:
    """How long a run is, in training steps and in optimizer steps: arithmetic on settings, prompts
    and progress.

    The learning rate goes by it, so that a schedule ends with the run even if prompts are left out.
    """

    def __init__(self, cfg: TrainerConfig, prompts: PromptStream, progress: Progress) -> None:
        self._cfg = cfg
        self._prompts = prompts
        self._progress = progress
        self._refilling = cfg.algorithm.dynamic_sampling.mode == "refill"

    @property
    def batches_left(self) -> int:
        """Batches that the remaining prompts make."""
        return self._prompts.steps(self._progress.position, self._progress.trained_early)

    @property
    def steps(self) -> int:
        """Steps of the whole run; while rejected prompts are replaced, the most that it can be."""
        done = self._progress.step
        most = self._cfg.max_training_steps
        left = self.batches_left
        return done + (min(left, max(most - done, 0)) if most and self._refilling else left)

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.updates_per_batch(self._cfg.train_batch_size)

    def updates_per_batch(self, groups: int) -> int:
        """Optimizer steps on a batch of so many groups."""
        return self._cfg.update_epochs_per_batch * ceil(
            groups / (self._cfg.policy_mini_batch_size or groups)
        )

    @property
    def planned_updates(self) -> int:
        """Optimizer steps before this training step as the learning rate counts them.

        Those that rejected groups would have made are counted too, so that the schedule ends with
        the run.
        """
        updates = self.updates_per_batch(self._cfg.train_batch_size)
        by_steps = self._progress.step * updates
        if not self._refilling:
            return by_steps
        steps = self._prompts.steps()
        most = self._cfg.max_training_steps
        total = min(steps, most or steps) * updates
        trained = self._progress.position + len(self._progress.trained_early)
        return max(by_steps, trained * total // self._prompts.total)


class Schedule:
    """When a run evaluates, saves and exports: every so many steps, or minutes since the last time;
    0 is never."""

    def __init__(self, cfg: TrainerConfig, now: Callable[[], float]) -> None:
        self._now = now
        self._intervals = {
            "evaluation": (cfg.eval_interval, 60 * cfg.eval_minutes),
            "checkpoint": (cfg.ckpt_interval, 60 * cfg.ckpt_minutes),
            "export": (cfg.export_interval, 0.0),
        }
        self._last: dict[str, float] = {}

    def begin(self) -> None:
        """The first step begins: minutes count from here."""
        self._last = dict.fromkeys(self._intervals, self._now())

    def reached(self, what: str, step: int) -> bool:
        """Whether it happens after this step; if so, it counts as done."""
        steps, seconds = self._intervals[what]
        late = seconds > 0 and what in self._last and self._now() - self._last[what] >= seconds
        if not (late or (steps > 0 and step % steps == 0)):
            return False
        self._last[what] = self._now()
        return True


#: Phases whose time is no part of a step's: ``time/step_s`` leaves them out.
BETWEEN_STEPS = ("eval", "checkpoint", "export")


class Phases:
    """The phases of a step, measured and limited: each is a span on the timeline and a metric,
    under the same name.

    Attributes:
        name: what the run is doing, for the terminal.
        metrics: of the current step.
        step: the current step, from 1; 0 before the first.
        between_steps_s: seconds of evaluation, checkpoints and exports so far.
        plan_runs: inside of the trainer's ``run``.
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
        self.limit_s = self.stall_s = limit_s
        self.timeline = Timeline(None)
        self._weights: dict[str, float] = {}  # of the metrics that ``mean`` adds to
        self._under_way: set[object] = set()
        self._last_s = 0.0  # when a step was under way
        self._open: set[str] = set()  # of ``BETWEEN_STEPS``: those that run now
        self._evaluated_s = 0.0  # by evaluations that have ended
        self._evaluation_began = 0.0

    def begin_step(self, step: int) -> None:
        """From here on phases and metrics are those of this step."""
        self.metrics = {}
        self.step = step
        self.name = "training"
        self._weights = {}

    def evaluation_s(self) -> float:
        """Seconds of evaluation so far, those of one that runs included."""
        if "eval" in self._open:
            current = self.now() - self._evaluation_began
        else:
            current = 0.0
        return self._evaluated_s + current

    def mean(self, name: str, value: float, weight: float) -> None:
        """A metric of a part of the step's batch: the metric of the step is the mean of its
        parts."""
        total = self._weights[name] = self._weights.get(name, 0.0) + weight
        before = self.metrics.get(name, value)
        self.metrics[name] = before + (value - before) * (weight / total if total else 0.0)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around what is a step's own work; tasks that it makes are not the plan's."""
        this = object()
        self._under_way.add(this)
        plan_code = PLAN_CODE.get()
        PLAN_CODE.set(False)
        try:
            yield
        finally:
            PLAN_CODE.set(plan_code)
            self._under_way.discard(this)
            self._last_s = self.now()

    def idle_s(self) -> float:
        """Seconds since a step did something else than wait for another."""
        if self._under_way:
            return 0.0
        return self.now() - self._last_s

    async def waiting(self, what: str, awaitable: Awaitable[T]) -> T:
        """Await something another part does, and account for the time as idle
        (``time/wait_<what>_s``)."""
        with self._span(f"wait_{what}"):
            return await awaitable

    @contextmanager
    def timed(
        self,
        name: str,
        into: Metrics | None = None,
        track: str = "trainer",
        step: int | None = None,
    ) -> Iterator[None]:
        """Measure a phase of a step, by default the current one: a span on the timeline and
        ``time/<name>_s``."""
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
        metrics = self.metrics if into is None else into
        start = self.now()
        between_steps_s = self.between_steps_s
        outermost = name in BETWEEN_STEPS and not self._open
        if outermost:
            self._open.add(name)
        if outermost and name == "eval":
            self._evaluation_began = start
        try:
            with self.timeline.span(name, track, step=self.step if step is None else step):
                yield
        finally:
            seconds = self.now() - start
            if outermost:
                self._open.discard(name)
                self.between_steps_s += seconds
                if name == "eval":
                    self._evaluated_s += seconds
            elif track == "trainer":
                seconds -= (
                    self.between_steps_s - between_steps_s
                )  # an export while the policy has its devices
            metrics[f"time/{name}_s"] = metrics.get(f"time/{name}_s", 0.0) + seconds

    @asynccontextmanager
    async def limited(self, what: str) -> AsyncIterator[None]:
        """End what takes longer than ``trainer.step_timeout_s`` with a TimeoutError that names
        phase, step and key."""
        with self.under_way():
            async with within(self.limit_s, f"the {what} of step {self.step}"):
                yield

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()


class RunContext:
    """The shared state of one run; every part of the trainer is made with it.

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
        self.refill, self.reward_model = Refill(cfg.trainer), RewardModelScorer(self)
        self.solved = SolvedGroups(cfg.data)
        self.run_dir: RunDirectory | None = None
        self.on_policy = False
        self.stop_reason = ""

    @asynccontextmanager
    async def generating(self, phase: str) -> AsyncIterator[None]:
        """As ``Phases.limited``; time in which the engines generate does not count."""
        with self.phases.under_way():
            async with self.generation_limit.limited(f"the {phase} of step {self.phases.step}"):
                yield
