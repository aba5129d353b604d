"""How busy the engines and the trainer were, by their own clocks.

Invariant: the shares are measured where the work is done (wall time with work in progress), not inferred from
who waited; overlapping phases are therefore not counted twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

NAMED = 8  # with more engines than this each one's speed is no metric of its own


@dataclass
class Usage:
    """Counters since start: of each engine seconds of work and tokens generated, and the trainer's seconds."""

    engines: list[EngineWork]
    trainer_busy_s: float


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


class UsageMeter:
    """Differences between readings, as metrics.

    Args:
        client: its ``stats()`` gives one ``EngineStats`` per engine, also for those that are gone; more may have come.
        dispatch: its ``stats()`` gives ``busy_s``.
    """

    def __init__(self, client: EngineStatsSource, dispatch: Workers) -> None:
        self._client, self._dispatch = client, dispatch
        self._last: Usage | None = None

    async def read(self) -> Usage:
        engines, trainer = await asyncio.gather(self._client.stats(), self._dispatch.stats())
        return Usage(list(engines), float(trainer["busy_s"]))

    async def start(self) -> None:
        self._last = await self.read()

    async def lap(self, wall_s: float, samples: int) -> dict[str, float]:
        """Metrics of the ``wall_s`` seconds since the last call, in which ``samples`` were trained."""
        before, now = self._last, await self.read()
        assert before is not None, "start() comes first"
        self._last, wall_s = now, max(wall_s, 1e-9)
        busy_s, tokens = 0.0, dict[int, float]()
        for number, new in enumerate(now.engines):
            if not new.gone:
                old = before.engines[number] if number < len(before.engines) else None
                busy_s += _since(old.busy_s if old else 0.0, new.busy_s)
                tokens[number] = _since(old.generated_tokens if old else 0, new.generated_tokens)
        each = tokens if 1 < len(tokens) <= NAMED else {}
        metrics = {
            **{f"throughput/engine_{n}_tokens_per_s": count / wall_s for n, count in each.items()},
            "time/step_s": wall_s,
            "idle/trainer": _idle((now.trainer_busy_s - before.trainer_busy_s) / wall_s),
            "throughput/samples_per_s": samples / wall_s,
        }
        if now.engines:  # else the run has none
            metrics["idle/engines"] = _idle(busy_s / max(len(tokens), 1) / wall_s)
            metrics["throughput/tokens_per_s"] = sum(tokens.values()) / wall_s
        return metrics


def _since(before: float, now: float) -> float:
    """The increase of a counter; one that has fallen belongs to a replacement engine."""
    return now - before if now >= before else now


def _idle(busy: float) -> float:
    """The rest; clocks of other processes may have counted a little too much, or restarted."""
    return 1.0 - min(max(busy, 0.0), 1.0)
