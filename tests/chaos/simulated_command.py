"""One command in simulation: how the controller manages its parts, and the effects of events on them.

Invariant: as in ``skyasync.run.controller`` and ``skyasync.run.recovery``: lost workers get a trainer that resumes from
the newest checkpoint, while engines and environments stay; any other error ends the command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skyasync.config.schema import Config
from skyasync.envs.episodes import EnvSettings
from skyasync.envs.pool import EnvPool
from skyasync.inference.client import InferenceClient
from skyasync.inference.supervisor import EngineSupervisor
from skyasync.observability.run_dir import RunDirectory
from skyasync.observability.timeline import Timeline
from skyasync.observability.trackers import MultiTracker
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.types import Group, Prompt
from skyasync.trainer import RayPPOTrainer
from skyasync.weight_sync.colocation import Colocation
from skyasync.weight_sync.sync import WeightSync
from tests.chaos.events import Event
from tests.chaos.simulated_processes import (
    SILENCE_S,
    Engine,
    Host,
    Letters,
    SimulatedProcess,
    digest,
)
from tests.chaos.simulated_ranks import Disk, Ranks

if TYPE_CHECKING:
    from skyasync.models.batch import TrainingBatch

RESTARTS = 1000


@dataclass(frozen=True)
class Batch:
    """In place of a ``TrainingBatch``: the content of each group."""

    groups: list[str]

    def mini_batches(self, size: int, first: int | None = None) -> Iterator[tuple[Batch, int]]:
        yield self, len(self.groups)  # without trainer.policy_mini_batch_size


def content(group: Group) -> str:
    """All that a loss reads of a group."""
    read = [
        (
            trajectory.id,
            trajectory.reward,
            [(s.kind, s.tokens.tolist(), s.versions.tolist()) for s in trajectory.segments],
        )
        for trajectory in group.trajectories
    ]
    return digest(read)


class Virtual(RayPPOTrainer):
    """Mixed in before a plan: counts training steps, and checks the staleness of every token."""

    async def prepare(self, groups: list[Group]) -> TrainingBatch:
        step, trainer = self.global_step + 1, self.cfg.trainer
        for group in groups:
            for trajectory in group.trajectories:
                oldest = int(min(trajectory.versions, default=step - 1))
                assert step - 1 - oldest <= self._allowed, (
                    f"{trajectory.id} is of version {oldest} in step {step}"
                )
                assert len(trajectory.actions) == 2, (
                    f"{trajectory.id} has {len(trajectory.actions)} turns"
                )
        assert trainer.train_batch_size >= len(groups)
        return cast("TrainingBatch", Batch([content(group) for group in groups]))

    @property
    def _allowed(self) -> int:
        """Staleness that a token may have: the plan's bound, except for episodes that began before a resume."""
        if self.streams or not self.asynchronous:
            return 10**9 if self._resumed_rollouts else 0
        if self.cfg.trainer.plan == "one_step_off":
            return 10**9 if self._resumed_rollouts else self.cfg.trainer.async_queue_size
        return self.cfg.trainer.max_staleness

    @property
    def _resumed_rollouts(self) -> bool:
        return self.cfg.trainer.ckpt_rollouts and self.checkpointer.saved_step > 0

    async def forward_backward(self, part: TrainingBatch, *, complete: bool = True) -> None:
        await cast(Ranks, self.dispatch).train(digest(cast(Batch, part).groups))

    async def optimizer_step(self) -> dict[str, float]:
        await cast(Ranks, self.dispatch).step(self.global_step + 1)
        return {}


class Command:
    """One start of the command.

    Attributes:
        error: the error that ended it.
        restarts: of workers.
    """

    def __init__(
        self,
        cfg: Config,
        plan: type[RayPPOTrainer],
        prompts: Sequence[Prompt],
        folder: Path,
        seed: int,
    ) -> None:
        self._cfg, self._plan, self._prompts, self._folder = deepcopy(cfg), plan, prompts, folder
        self._disk, self._hosts = Disk(), list[Host]()
        self.error: BaseException | None = None
        self.restarts = 0
        self._task: asyncio.Task[None] | None = None
        own, engines = cfg.generator.num_inference_engines, cfg.generator.own_engines
        self._client = InferenceClient([Engine() for _ in range(engines)])
        self._ranks = Ranks(self._disk)
        self._colocation: Colocation | None = None
        source, destination = cast(Any, self._ranks), cast(Any, self._client)
        if cfg.trainer.placement.colocate_all or engines > own:
            self._colocation = Colocation(source, self._client, (), range(own, engines))
            source, destination = self._colocation.source, self._colocation.destination
        self._sync = WeightSync(source, destination, ())
        self._sync.expects_late_engines = True
        if self._colocation is not None:
            self._colocation.weights = self._sync
        env = EnvSettings({}, step_timeout_s=15.0)
        self._pool = EnvPool(lambda: self._host(env), 2, env)
        self._supervisor = EngineSupervisor(
            self._client, self._sync, max_restarts=RESTARTS, heartbeat_s=1.0, heartbeat_timeout_s=SILENCE_S,
            limit_s=600, colocation=self._colocation,
        )  # fmt: skip
        self._generator = EpisodeGenerator(
            self._client,
            self._pool,
            cast(Any, Letters()),
            1024,
            EpisodeLimits(),
            apply_chat_template=False,
        )

    def _host(self, settings: EnvSettings) -> Host:
        self._hosts.append(Host(settings))
        return self._hosts[-1]

    @property
    def weights(self) -> str:
        """Of the policy now."""
        return self._ranks.weights

    async def run(self) -> bool:
        """Whether it finished; if not, ``error`` has the reason."""
        self._task = asyncio.create_task(self._to_the_end())
        try:
            await asyncio.wait([self._task])
            self.error = (
                asyncio.CancelledError() if self._task.cancelled() else self._task.exception()
            )
        finally:
            await self._close()
        if isinstance(self.error, AssertionError):
            raise self.error
        return self.error is None

    async def _to_the_end(self) -> None:
        if self._colocation is not None:
            await self._colocation.start()
        else:
            await asyncio.gather(self._client.start(), self._ranks.start())
        trainer = self._trainer()
        while True:
            try:
                await trainer.run()
                return
            except Exception as error:
                if self._ranks.lost is None or isinstance(error, AssertionError):
                    raise
            self.restarts += 1
            await self._ranks.shutdown()
            if self._colocation is not None:
                await self._colocation.policy_is_lost()
            self._ranks = Ranks(self._disk)
            await self._ranks.start()
            if self._colocation is not None:
                self._colocation.restart(cast(Any, self._ranks))
            self._sync.restart(
                self._colocation.source if self._colocation else cast(Any, self._ranks)
            )
            trainer = self._trainer()

    def _trainer(self) -> RayPPOTrainer:
        cfg, run_dir = deepcopy(self._cfg), RunDirectory(self._folder, "run", resume=True)
        there = run_dir.checkpoints.is_dir() and any(run_dir.checkpoints.iterdir())
        cfg.trainer.resume_mode = "latest" if there else "none"
        trainer = self._plan.get_trainer(
            cfg=cfg, tracker=MultiTracker(["jsonl"], run_dir), tokenizer=cast(Any, None),
            train_dataset=self._prompts, eval_dataset=None, inference_engine_client=self._client,
            generator=self._generator, colocate_pg=None,
        )  # fmt: skip
        trainer.callbacks.append(self._supervisor)
        clock = asyncio.get_running_loop().time
        trainer.attach(
            cast(Any, self._ranks), self._sync, timeline=Timeline(None, clock=clock, memory=16), run_dir=run_dir,
            colocation=self._colocation,
        )  # fmt: skip
        return trainer

    async def _close(self) -> None:
        await self._generator.close()
        await self._supervisor.close()
        self._pool.pool.close()
        await self._client.shutdown()
        await self._ranks.shutdown()

    # ---------------------------------------------------------------- events

    def inject(self, event: Event) -> bool:
        """Inject a fault; return whether there was a target."""
        about = event.about
        if about.target in ("controller", "driver"):
            return self._task is not None and self._task.cancel()
        if about.deed == "fill":
            self._disk.full_until = asyncio.get_running_loop().time() + event.lasts
        elif about.target == "weights":
            self._ranks.flip = True
        else:
            return self._inject_into_process(event)
        return True

    def _inject_into_process(self, event: Event) -> bool:
        engines = [cast(Engine, engine).process for engine in self._client.engines]
        hosts = [cast(Host, link.worker).process for link in self._pool.pool.processes]
        of = {
            "engine": engines,
            "rank": [self._ranks.process],
            "environment": hosts,
            "messages": [*engines, *hosts],
        }
        running = [process for process in of[event.about.target] if not process.killed.is_set()]
        if not running:
            return False
        process = running[int(event.pick * len(running))]
        DEEDS[event.about.deed](process, event)
        return True


def _freeze(process: SimulatedProcess, event: Event) -> None:
    process.runs.clear()
    if not event.hangs:
        asyncio.get_running_loop().call_later(event.lasts, process.runs.set)


def _drop(process: SimulatedProcess, event: Event) -> None:
    process.dropped += 1


def _delay(process: SimulatedProcess, event: Event) -> None:
    process.late_s = event.lasts
    asyncio.get_running_loop().call_later(event.lasts, setattr, process, "late_s", 0.0)


DEEDS = {
    "kill": lambda process, event: process.kill(),
    "freeze": _freeze,
    "drop": _drop,
    "delay": _delay,
}
