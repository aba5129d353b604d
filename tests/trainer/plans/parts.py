"""A run with scripted parts and the real trainer: durations and faults are given.

Engines record their real weight version for each token, and complain if it changes under a request. The dispatch
records which prompts each update trained, read from its tensors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from skyasync.config.schema import Config
from skyasync.data.prompts import PromptStream
from skyasync.inference.interface import EngineStats
from skyasync.rollout.types import Prompt, PromptId
from skyasync.simulate.clock import run_virtual
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import (
    ColocatedAsyncRayPPOTrainer,
    FullyAsyncRayPPOTrainer,
    HybridAsyncRayPPOTrainer,
)
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from skyasync.utils import manifest
from skyasync.utils.manifest import Sums

PLANS = [
    RayPPOTrainer,
    AsyncRayPPOTrainer,
    FullyAsyncRayPPOTrainer,
    StreamedRayPPOTrainer,
    ColocatedAsyncRayPPOTrainer,
    HybridAsyncRayPPOTrainer,
]
BOUNDED = (
    PLANS[2],
    *PLANS[4:],
)  # the plans of ``admission``: groups are trained in the order in which they finish
EPOCH, ROW = 100, 1000  # a prompt's tokens are its epoch and its row, plus these


class Faults:
    """``faults["sync", 2] = error`` raises ``error`` in the second sync (calls count from 1)."""

    def __init__(self) -> None:
        self.planned: dict[tuple[str, int], BaseException] = {}
        self.calls: Counter[str] = Counter()

    def __setitem__(self, key: tuple[str, int], error: BaseException) -> None:
        self.planned[key] = error

    def pass_or_raise(self, part: str) -> None:
        self.calls[part] += 1
        if error := self.planned.get((part, self.calls[part])):
            raise error


@dataclass
class Engines:
    """The trainer's interface to the inference client."""

    faults: Faults
    version: int = -1
    paused: bool = False
    generating: int = 0  # training requests
    update_in_flight: bool = False  # whether weights may change under them

    async def pause(self, mode: str) -> None:
        self.faults.pass_or_raise("pause")
        self.paused = True

    async def resume(self) -> None:
        self.faults.pass_or_raise("resume")
        self.paused = False

    async def waiting(self) -> int:
        return 0

    async def stats(self) -> list[EngineStats]:
        self.faults.pass_or_raise("stats")
        return [EngineStats()]


@dataclass
class ScriptedGenerator:
    """Each trajectory is one action of two tokens, right every other time; ``asked`` are the prompts, in order."""

    engines: Engines
    seconds: Callable[[], float]
    stamps: bool = True
    truncated: frozenset[int] = frozenset()  # repetitions whose response is cut by its length
    all_right: frozenset[int] = frozenset()  # rows whose samples are all right
    asked: list[PromptId] = field(default_factory=list)
    started: list[tuple[float, int]] = field(default_factory=list)  # (when, engine's version)
    cancelled: int = 0

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        ids, is_eval = input_batch["trajectory_ids"], input_batch["is_eval"]
        version = self.engines.version
        if not is_eval:
            self.engines.generating += 1
            self.asked += [i.prompt for i in ids if i.repetition == 0]
            self.started.append((asyncio.get_running_loop().time(), version))
        try:
            await asyncio.sleep(self.seconds())
            self.engines.faults.pass_or_raise("evaluate" if is_eval else "generate")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.engines.generating -= not is_eval
        assert self.engines.update_in_flight or self.engines.version == version, (
            "weights changed under a request"
        )
        output = {
            "prompt_token_ids": [[EPOCH + i.prompt.epoch, ROW + i.prompt.row] for i in ids],
            "response_ids": [[7, 8] for _ in ids],
            "rewards": [
                float(i.repetition % 2) if i.prompt.row not in self.all_right else 1.0 for i in ids
            ],
            "loss_masks": [[1, 1] for _ in ids],
            "stop_reasons": ["length" if i.repetition in self.truncated else "stop" for i in ids],
            "rollout_logprobs": [[-0.5, -0.5] for _ in ids],
        }
        return output | (
            {"rollout_versions": [[version, self.engines.version] for _ in ids]}
            if self.stamps
            else {}
        )


@dataclass
class Dispatch:
    """Keeps each update's prompts (in order, one entry per group) and its batch."""

    faults: Faults
    seconds: Callable[[], float]
    trained: list[list[PromptId]] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)  # of the current update
    scheduled: list[int] = field(
        default_factory=list
    )  # optimizer steps by which the learning rate changes
    exported: list[Path] = field(default_factory=list)
    weights: int = 0  # in place of the model: its number of updates
    cancelled: int = 0
    writing_s: float = 0.0  # that a checkpoint takes while training continues
    pending_save: tuple[Path, int, float] = (Path(), 0, 0.0)  # folder, weights, end

    async def forward_backward(self, batch: Any, role: str = "policy") -> None:
        try:
            await asyncio.sleep(self.seconds())
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.faults.pass_or_raise("update")
        self.parts.append(batch)

    async def optimizer_step(
        self, schedule_step: int, scale: float = 1.0, role: str = "policy", **changes: Any
    ) -> dict[str, float]:
        rows = [row for batch in self.parts for row in batch.tokens]
        ids = [PromptId(int(row[0]) - EPOCH, int(row[1]) - ROW) for row in rows]
        self.trained.append(list(dict.fromkeys(ids)))
        self.scheduled.append(schedule_step)
        self.batches += self.parts
        self.parts = []
        self.weights += 1
        return {"loss": float(self.weights)}

    async def ask(self, role: str, method: str, batch: Any) -> torch.Tensor:
        if role == "policy":
            self.faults.pass_or_raise(method)
        return torch.where(batch.loss_mask, -0.5, 0.0)

    async def save(self, folder: Path) -> None:
        (folder / "weights").write_text(str(self.weights))
        self.faults.pass_or_raise("save")

    async def begin_save(self, folder: Path) -> None:
        self.pending_save = (
            folder,
            self.weights,
            asyncio.get_running_loop().time() + self.writing_s,
        )

    async def saved(self) -> Sums | None:
        folder, weights, end = self.pending_save
        if asyncio.get_running_loop().time() < end:
            return None
        (folder / "weights").write_text(str(weights))
        self.faults.pass_or_raise("save")
        return {}

    async def verify(self, folder: Path, sums: Sums) -> list[str]:
        return list(manifest.damage(folder, sums))

    async def load(self, folder: Path) -> None:
        self.weights = int((folder / "weights").read_text())

    async def export(self, folder: Path, role: str = "policy") -> None:
        self.faults.pass_or_raise("export")
        self.exported.append(folder)

    async def stats(self) -> dict[str, float]:
        return {"busy_s": 0.0}


@dataclass
class Sync:
    engines: Engines
    seconds: Callable[[], float]
    versions: list[int] = field(default_factory=list)

    async def sync(self, version: int, paused: Any = nullcontext) -> None:
        async with paused():
            idle = self.engines.generating == 0
            assert idle or self.engines.update_in_flight, (
                "a training batch is generated during a weight update"
            )
            await asyncio.sleep(self.seconds())
            self.engines.faults.pass_or_raise("sync")
            self.engines.version = version
            self.versions.append(version)

    async def verify(self, version: int) -> dict[str, float]:
        assert self.engines.version == version
        return {"sync/logprob_gap": 0.0}

    def sampled(self, version: int, gap: float) -> None: ...


@dataclass
class RecordingTracker:
    faults: Faults
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    closed: int = 0

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.faults.pass_or_raise("log")
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1
        self.faults.pass_or_raise("close")

    def of(self, name: str) -> dict[int, float]:
        """The metric by step, for steps that logged it."""
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}


class RecordingTimeline:
    """The trainer's interface to the timeline, and whether it was closed."""

    def __init__(self) -> None:
        from skyasync.observability.timeline import Timeline

        self._timeline = Timeline(None)
        self.span, self.spans, self.closed = self._timeline.span, self._timeline.spans, 0
        self.elapsed_s = self._timeline.elapsed_s

    def close(self) -> None:
        self.closed += 1


@dataclass
class Run:
    trainer: Any
    faults: Faults
    engines: Engines
    generator: ScriptedGenerator
    dispatch: Dispatch
    sync: Sync
    tracker: RecordingTracker
    timeline: RecordingTimeline

    def train(self) -> Run:
        run_virtual(self.trainer.run())
        return self

    @property
    def trained(self) -> list[PromptId]:
        """Every trained prompt, in order."""
        return [identity for update in self.dispatch.trained for identity in update]


def dataset(size: int) -> list[Prompt]:
    return [
        Prompt(PromptId(0, row), [{"role": "user", "content": str(row)}], "none")
        for row in range(size)
    ]


def stream(prompts: int, *, epochs: int = 1) -> list[PromptId]:
    """Every prompt of a run with batches of 4, in the order in which it must be trained."""
    whole = PromptStream(dataset(prompts), 4, Config().trainer.seed, prompts * epochs)
    return [prompt.id for prompt in whole.cursor().take(whole.total).prompts]


def durations(*seconds: float) -> Callable[[], float]:
    """These, over and over."""
    endless = cycle(seconds or (1.0,))
    return lambda: next(endless)


def config(**settings: Any) -> Config:
    """Dots in a key are written as two underscores."""
    cfg = Config()
    cfg.generator.n_samples_per_prompt = 2
    cfg.trainer.eval_before_train = False
    for name, value in settings.items():
        *path, last = name.split("__")
        part: Any = cfg
        for attribute in path:
            part = getattr(part, attribute)
        assert hasattr(part, last), name
        setattr(part, last, value)
    return cfg


def make_run(
    plan: type[RayPPOTrainer],
    *,
    prompts: int = 12,
    eval_prompts: int = 0,
    generating: Sequence[float] = (1.0,),
    updating: Sequence[float] = (1.0,),
    syncing: Sequence[float] = (0.1,),
    callbacks: Sequence[Any] = (),
    run_dir: Any = None,
    all_right: frozenset[int] = frozenset(),
    train: Sequence[Prompt] | None = None,
    **settings: Any,
) -> Run:
    cfg = config(**{"trainer__train_batch_size": 4, **settings})
    faults = Faults()
    engines = Engines(faults, update_in_flight=issubclass(plan, FullyAsyncRayPPOTrainer))
    generator = ScriptedGenerator(engines, durations(*generating), all_right=all_right)
    dispatch, sync = Dispatch(faults, durations(*updating)), Sync(engines, durations(*syncing))
    tracker, timeline = RecordingTracker(faults), RecordingTimeline()
    trainer = plan.get_trainer(
        cfg=cfg,
        tracker=tracker,
        tokenizer=None,
        train_dataset=dataset(prompts) if train is None else train,
        eval_dataset=dataset(eval_prompts),
        inference_engine_client=engines,
        generator=generator,
        callbacks=callbacks,
    )
    trainer.attach(dispatch, sync, timeline=timeline, run_dir=run_dir)  # type: ignore[arg-type]
    return Run(trainer, faults, engines, generator, dispatch, sync, tracker, timeline)
