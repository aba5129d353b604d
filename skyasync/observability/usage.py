"""Shares of the time in which the engines and the trainer worked, by their own clocks.

Invariant: the shares are measured where the work is done (wall time with work in progress), not
inferred from waits; overlapping phases are therefore not counted twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

NAMED = 8  # with more engines the speed of one is no metric


@dataclass
class Usage:
    """Counters since the start of the run.

    Attributes:
        engines: seconds of work and tokens generated, by engine.
        trainer_busy_s: seconds in which the trainer worked.
        read_s: when the counters had been read.
        between_steps_s: seconds of evaluation, checkpoints and exports until then.
    """

    engines: list[EngineWork]
    trainer_busy_s: float
    read_s: float
    between_steps_s: float


class EngineWork(Protocol):
    """An engine's work since it started; ``gone``: it has left."""

    @property
    def busy_s(self) -> float: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def gone(self) -> bool: ...


class EngineStatsSource(Protocol):
    async def stats(self) -> Sequence[EngineWork]: ...


class Workers(Protocol):
    async def stats(self) -> Mapping[str, float]: ...


class StepClock(Protocol):
    """The clock of a run, and how much of its time is no step's."""

    between_steps_s: float

    def now(self) -> float: ...


class UsageMeter:
    """Differences between readings, as metrics. A step lasts from one reading to the next.

    Args:
        client: its ``stats()`` gives one ``EngineStats`` per engine, also for those that are gone;
            more may have come.
        dispatch: its ``stats()`` gives ``busy_s``.
    """

    def __init__(self, client: EngineStatsSource, dispatch: Workers, clock: StepClock) -> None:
        self._client = client
        self._dispatch = dispatch
        self._clock = clock
        self._reading: Usage | None = None  # at the beginning of the step

    async def start(self) -> None:
        """The first step begins."""
        self._reading = await self._read()

    async def lap(self, samples: int) -> dict[str, float]:
        """Metrics of the step that ends now, in which ``samples`` were trained."""
        assert self._reading is not None, "start() comes first"
        begin = self._reading
        end = await self._read()
        self._reading = end
        interval_s = end.read_s - begin.read_s
        step_s = interval_s - (end.between_steps_s - begin.between_steps_s)
        metrics = {"time/step_s": step_s, "time/interval_s": interval_s}
        # A simulated step may take no time.
        return metrics | _rates(begin, end, samples, max(interval_s, 1e-9))

    async def _read(self) -> Usage:
        engines, trainer = await asyncio.gather(self._client.stats(), self._dispatch.stats())
        busy_s = float(trainer["busy_s"])
        # The clock is read after the counters: they have counted until about now.
        return Usage(list(engines), busy_s, self._clock.now(), self._clock.between_steps_s)


def _rates(begin: Usage, end: Usage, samples: int, interval_s: float) -> dict[str, float]:
    """Rates and idle shares of the time between two readings.

    The counters are read with that time: they may have counted during evaluations.
    """
    busy_s = 0.0
    tokens: dict[int, float] = {}
    for number, engine in enumerate(end.engines):
        if engine.gone:
            continue
        old_busy_s = 0.0
        old_tokens = 0
        if number < len(begin.engines):  # else the engine is new
            old_busy_s = begin.engines[number].busy_s
            old_tokens = begin.engines[number].generated_tokens
        busy_s += _increase(old_busy_s, engine.busy_s)
        tokens[number] = _increase(old_tokens, engine.generated_tokens)
    trainer_busy_s = end.trainer_busy_s - begin.trainer_busy_s
    metrics = {
        "idle/trainer": _idle(trainer_busy_s / interval_s),
        "throughput/samples_per_s": samples / interval_s,
    }
    if end.engines:  # else the run has none
        metrics["idle/engines"] = _idle(busy_s / max(len(tokens), 1) / interval_s)
        metrics["throughput/tokens_per_s"] = sum(tokens.values()) / interval_s
    if 1 < len(tokens) <= NAMED:
        for number, count in tokens.items():
            metrics[f"throughput/engine_{number}_tokens_per_s"] = count / interval_s
    return metrics


def _increase(old: float, new: float) -> float:
    """The increase of a counter; one that has fallen is of a replacement engine, from 0."""
    if new >= old:
        return new - old
    return new


def _idle(busy: float) -> float:
    """The idle share for a share of work.

    Clocks of other processes may have counted a little too much, or restarted.
    """
    return 1.0 - min(max(busy, 0.0), 1.0)
