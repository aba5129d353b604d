"""How busy the engines and the trainer were, by their own clocks.

Invariant: the shares are measured where the work is done (wall time with work in progress), not
inferred from who waited; overlapping phases are therefore not counted twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

NAMED = 8  # with more engines than this each one's speed is no metric of its own


@dataclass
class Usage:
    """Counters since start: of each engine seconds of work and tokens generated, and the trainer's
    seconds.

    Attributes:
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
        self._last: Usage | None = None

    async def start(self) -> None:
        """The first step begins."""
        self._last = await self._read()

    async def lap(self, samples: int) -> dict[str, float]:
        """Metrics of the step that ends now, in which ``samples`` were trained."""
        assert self._last is not None, "start() comes first"
        before = self._last
        now = self._last = await self._read()
        interval_s = now.read_s - before.read_s
        step_s = interval_s - (now.between_steps_s - before.between_steps_s)
        metrics = {"time/step_s": step_s, "time/interval_s": interval_s}
        return metrics | _rates(before, now, samples, max(interval_s, 1e-9))

    async def _read(self) -> Usage:
        engines, trainer = await asyncio.gather(self._client.stats(), self._dispatch.stats())
        busy_s = float(trainer["busy_s"])
        return Usage(list(engines), busy_s, self._clock.now(), self._clock.between_steps_s)


def _rates(before: Usage, now: Usage, samples: int, interval_s: float) -> dict[str, float]:
    """Rates and idle shares of the time between two readings, from the counters of the same
    time."""
    busy_s = 0.0
    tokens: dict[int, float] = {}
    for number, new in enumerate(now.engines):
        if new.gone:
            continue
        if number < len(before.engines):
            old = before.engines[number]
        else:
            old = None
        busy_s += _since(old.busy_s if old else 0.0, new.busy_s)
        tokens[number] = _since(old.generated_tokens if old else 0, new.generated_tokens)
    metrics = {
        "idle/trainer": _idle((now.trainer_busy_s - before.trainer_busy_s) / interval_s),
        "throughput/samples_per_s": samples / interval_s,
    }
    if now.engines:  # else the run has none
        metrics["idle/engines"] = _idle(busy_s / max(len(tokens), 1) / interval_s)
        metrics["throughput/tokens_per_s"] = sum(tokens.values()) / interval_s
    if 1 < len(tokens) <= NAMED:
        for number, count in tokens.items():
            metrics[f"throughput/engine_{number}_tokens_per_s"] = count / interval_s
    return metrics


def _since(before: float, now: float) -> float:
    """The increase of a counter; one that has fallen belongs to a replacement engine."""
    if now >= before:
        return now - before
    return now


def _idle(busy: float) -> float:
    """The rest; clocks of other processes may have counted a little too much, or restarted."""
    return 1.0 - min(max(busy, 0.0), 1.0)
