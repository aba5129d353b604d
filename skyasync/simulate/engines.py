"""Engines that decode in simulated time.

Invariant: a sequence gets exactly its tokens, each under the version that the engine had at that
time; busy time is counted per slot, so that ``1 - busy`` is the share of the engine's capacity that
is idle.

All running sequences of an engine advance together, one token per decode step, so an engine keeps
one clock that counts decode steps. A sequence that starts at step p and has n tokens to go ends at
step p + n: one heap entry, and nothing to be done in between, however many sequences run and
however often weights are updated.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count

from skyasync.inference.interface import EngineStats

_EPSILON = 1e-6  # decode steps; far below one token, far above rounding


@dataclass
class DecodeCosts:
    """Seconds per decode step with ``n`` running sequences: ``base_s + per_sequence_s * n``.

    Args:
        slots: sequences that run at once.
        prefill: decode steps that a prompt's token costs (0.01: a hundred tokens take as long as
            one step).
    """

    slots: int
    base_s: float
    per_sequence_s: float = 0.0
    prefill: float = 0.0

    def step_s(self, running: int) -> float:
        return self.base_s + self.per_sequence_s * running


@dataclass
class Sequence:
    """One trajectory: ``tokens`` by the version that computed them, once ``done``."""

    prompt: int
    left: int
    done: asyncio.Future[None]
    tokens: Counter[int] = field(default_factory=Counter)
    started: float = 0.0  # decode step at which its next token begins
    engine: int = 0


class VirtualEngine:
    """Runs up to ``costs.slots`` sequences; the others wait in order of arrival."""

    def __init__(self, costs: DecodeCosts) -> None:
        self.costs = costs
        self._waiting: deque[Sequence] = deque()
        self._running: list[
            tuple[float, int, Sequence]
        ] = []  # by the decode step at which they end
        self._updates: list[tuple[float, int]] = [(0.0, 0)]  # (decode step, version from there on)
        self._numbers = count()
        self._paused = False
        # decode steps done, and when that was
        self._steps = 0.0
        self._updated = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stats = EngineStats()

    def submit(self, sequence: Sequence, *, first: bool = False) -> None:
        """``first``: in front of the sequences that wait."""
        self._advance()
        self._waiting.insert(0 if first else len(self._waiting), sequence)
        self._fill()

    def withdraw(self, count: int) -> list[Sequence]:
        """So many of the sequences that wait, the newest first, leave the engine."""
        return [self._waiting.pop() for _ in range(min(count, len(self._waiting)))]

    def pause(self) -> None:
        self._advance()
        self._paused = True
        self._arm()

    def resume(self) -> None:
        self._advance()
        self._paused = False
        self._fill()

    def cut(self) -> None:
        """Put what runs back in front of the queue; it starts again with the prefill of all it
        has."""
        self._advance()
        for _, _, sequence in sorted(self._running, reverse=True):
            self._settle(sequence)
            self._waiting.appendleft(sequence)
        self._running = []

    def set_version(self, version: int) -> None:
        self._advance()
        self._updates.append((self._steps, version))
        # No running sequence has tokens of an update before the oldest start.
        oldest = min((sequence.started for _, _, sequence in self._running), default=self._steps)
        del self._updates[: max(0, bisect_left(self._updates, (oldest, -1)) - 1)]

    def stats(self) -> EngineStats:
        self._advance()
        self._stats.running, self._stats.waiting = len(self._running), len(self._waiting)
        return EngineStats(**vars(self._stats))

    def _advance(self) -> None:
        """Account for the time since the last call."""
        now = asyncio.get_running_loop().time()
        passed = now - self._updated
        self._updated = now
        if self._paused:
            self._stats.paused_s += passed
        elif self._running:
            self._steps += passed / self.costs.step_s(len(self._running))
            self._stats.busy_s += passed * len(self._running) / self.costs.slots

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.costs.slots and not self._paused:
            sequence = self._waiting.popleft()
            sequence.started = self._steps + self.costs.prefill * (
                sequence.prompt + sequence.tokens.total()
            )
            heapq.heappush(
                self._running, (sequence.started + sequence.left, next(self._numbers), sequence)
            )
        self._arm()

    def _arm(self) -> None:
        """Set the timer to the next sequence's end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._paused:
            seconds = max(self._running[0][0] - self._steps, 0.0) * self.costs.step_s(
                len(self._running)
            )
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end_sequences)

    def _end_sequences(self) -> None:
        self._advance()
        while self._running and self._running[0][0] <= self._steps + _EPSILON:
            end, _, sequence = heapq.heappop(self._running)
            self._settle(sequence, end)
            if not sequence.done.done():  # its rollout may have been cancelled
                sequence.done.set_result(None)
        self._fill()

    def _settle(self, sequence: Sequence, end: float | None = None) -> None:
        """Count the whole tokens of a sequence since it started; each belongs to the version that
        completed it."""
        if end is not None:
            got = sequence.left
        else:
            got = max(0, min(int(self._steps - sequence.started), sequence.left))
        first = bisect_left(self._updates, (sequence.started + 1, -1)) - 1
        counted = 0
        for following in range(first + 1, len(self._updates) + 1):
            last = following == len(self._updates)
            if last:
                until = got
            else:
                until = int(self._updates[following][0] - sequence.started + _EPSILON)
            if min(got, until) > counted:
                sequence.tokens[self._updates[following - 1][1]] += min(got, until) - counted
                counted = min(got, until)
            if counted >= got:
                break
        sequence.left -= got
        self._stats.generated_tokens += got


class VirtualClient:
    """What the trainer asks of an inference client, for many engines: the least loaded one gets the
    next sequence."""

    def __init__(self, engines: list[VirtualEngine], asleep: Collection[int] = ()) -> None:
        self.engines = engines
        self._in_flight = [0] * len(engines)
        self._asleep = frozenset(asleep)
        self._by_load = [
            (0, i) for i in range(len(engines)) if i not in self._asleep
        ]  # outdated entries are skipped

    def submit(self, prompt: int, tokens: int) -> Sequence:
        sequence = Sequence(prompt, tokens, asyncio.get_running_loop().create_future())
        sequence.done.add_done_callback(lambda _: self._load(sequence.engine, -1))
        self._assign(sequence)
        return sequence

    async def pause(self, mode: str = "keep") -> None:
        for engine in self.engines:
            engine.pause()

    async def cut(self) -> None:
        for engine in self.engines:
            engine.pause()
            engine.cut()

    async def resume(self) -> None:
        for index, engine in enumerate(self.engines):
            if index not in self._asleep:
                engine.resume()

    async def sleep(self, engines: Collection[int]) -> None:
        """The sequences of these engines continue at the others."""
        self._asleep |= frozenset(engines)
        self._sort_by_load()
        for index in engines:
            engine = self.engines[index]
            engine.pause()
            engine.cut()
            for sequence in engine.withdraw(self._in_flight[index]):
                self._load(index, -1)
                self._assign(sequence, first=True)

    async def wake(self, engines: Collection[int]) -> None:
        """These engines get their share of the sequences that wait at others."""
        self._asleep -= frozenset(engines)
        self._sort_by_load()
        for index in engines:
            self.engines[index].resume()
        share = -(-sum(self._in_flight) // (len(self.engines) - len(self._asleep)))
        for index, engine in enumerate(self.engines):
            for sequence in engine.withdraw(self._in_flight[index] - share):
                self._load(index, -1)
                self._assign(sequence)

    async def waiting(self) -> int:
        return sum(stats.waiting for stats in await self.stats())

    async def stats(self) -> list[EngineStats]:
        return [engine.stats() for engine in self.engines]

    def set_version(self, version: int) -> None:
        for engine in self.engines:
            engine.set_version(version)

    def _assign(self, sequence: Sequence, *, first: bool = False) -> None:
        load, index = heapq.heappop(self._by_load)
        while load != self._in_flight[index]:
            load, index = heapq.heappop(self._by_load)
        sequence.engine = index
        self._load(index, +1)
        self.engines[index].submit(sequence, first=first)

    def _load(self, index: int, change: int) -> None:
        self._in_flight[index] += change
        if index in self._asleep:
            return
        heapq.heappush(self._by_load, (self._in_flight[index], index))
        if len(self._by_load) > 4 * len(self.engines) + 64:
            self._sort_by_load()

    def _sort_by_load(self) -> None:
        self._by_load = [
            (load, i) for i, load in enumerate(self._in_flight) if i not in self._asleep
        ]
        heapq.heapify(self._by_load)
