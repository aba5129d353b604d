"""Engines that decode in simulated time.

Invariant: a sequence gets exactly its tokens, each under the version that the engine had at that
time. Busy time is counted per slot, so that ``1 - busy`` is the idle fraction of the engine's
capacity.

All running sequences of an engine advance together, one token per decode step, so an engine has one
clock that counts decode steps. A sequence that starts at step p and has n tokens to go ends at step
p + n. It is one heap entry, without work in between, however many sequences run and however often
weights are updated.
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
    """One trajectory.

    Attributes:
        prompt: tokens of its prompt.
        left: tokens that it will still get.
        tokens: version -> tokens that it has computed; complete when ``done`` is.
        started: decode step at which its next token began, or would have begun.
        engine: index of its engine.
    """

    prompt: int
    left: int
    done: asyncio.Future[None]
    tokens: Counter[int] = field(default_factory=Counter)
    started: float = 0.0
    engine: int = 0


class VirtualEngine:
    """Runs up to ``costs.slots`` sequences; the others wait in order of arrival."""

    def __init__(self, costs: DecodeCosts) -> None:
        self.costs = costs
        self._waiting: deque[Sequence] = deque()
        # Heap of (decode step of the end, number, sequence). Numbers are unique: sequences are
        # never compared.
        self._running: list[tuple[float, int, Sequence]] = []
        self._updates: list[tuple[float, int]] = [(0.0, 0)]  # (decode step, version from there on)
        self._numbers = count()
        self._is_paused = False
        self._steps = 0.0  # decode steps until ``_updated_s``
        self._updated_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stats = EngineStats()

    def submit(self, sequence: Sequence, *, in_front: bool = False) -> None:
        """Add a sequence.

        Args:
            in_front: of the sequences that wait.
        """
        self._advance()
        if in_front:
            self._waiting.appendleft(sequence)
        else:
            self._waiting.append(sequence)
        self._fill()

    def withdraw(self, count: int) -> list[Sequence]:
        """Remove so many of the sequences that wait, the newest first."""
        return [self._waiting.pop() for _ in range(min(count, len(self._waiting)))]

    def pause(self) -> None:
        """Stop decoding; sequences keep their slots."""
        self._advance()
        self._is_paused = True
        self._set_timer()

    def resume(self) -> None:
        """Decode again."""
        self._advance()
        self._is_paused = False
        self._fill()

    def cut(self) -> None:
        """Put running sequences back in front of the queue.

        They start again with the prefill of all tokens that they have.
        """
        self._advance()
        for _, _, sequence in sorted(self._running, reverse=True):
            self._settle(sequence)
            self._waiting.appendleft(sequence)
        self._running = []

    def set_version(self, version: int) -> None:
        """Compute tokens under this version from here on."""
        self._advance()
        self._updates.append((self._steps, version))
        # No running sequence has tokens of an update before the oldest start.
        oldest = min((sequence.started for _, _, sequence in self._running), default=self._steps)
        del self._updates[: max(0, bisect_left(self._updates, (oldest, -1)) - 1)]

    def stats(self) -> EngineStats:
        """A copy of the counters until now."""
        self._advance()
        stats = self._stats
        stats.running = len(self._running)
        stats.waiting = len(self._waiting)
        return EngineStats(**vars(stats))

    def _advance(self) -> None:
        """Account for the time since the previous call."""
        now_s = asyncio.get_running_loop().time()
        passed_s = now_s - self._updated_s
        self._updated_s = now_s
        running = len(self._running)
        if self._is_paused:
            self._stats.paused_s += passed_s
        elif running:
            self._steps += passed_s / self.costs.step_s(running)
            self._stats.busy_s += passed_s * running / self.costs.slots

    def _fill(self) -> None:
        """Give free slots to sequences that wait."""
        while self._waiting and len(self._running) < self.costs.slots and not self._is_paused:
            sequence = self._waiting.popleft()
            prefilled_tokens = sequence.prompt + sequence.tokens.total()
            sequence.started = self._steps + self.costs.prefill * prefilled_tokens
            end = sequence.started + sequence.left
            heapq.heappush(self._running, (end, next(self._numbers), sequence))
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer to the end of the next sequence."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._is_paused:
            steps = max(self._running[0][0] - self._steps, 0.0)
            seconds = steps * self.costs.step_s(len(self._running))
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
        """Count the complete tokens of a sequence since it started.

        A token belongs to the version that completed it.

        Args:
            end: decode step at which the sequence ends; None: it is interrupted.
        """
        if end is not None:
            new_tokens = sequence.left
        else:
            new_tokens = max(0, min(int(self._steps - sequence.started), sequence.left))
        # The update under which the first token was completed.
        oldest = bisect_left(self._updates, (sequence.started + 1, -1)) - 1
        counted_tokens = 0
        for index in range(oldest, len(self._updates)):
            total = new_tokens  # that are complete when the next update comes
            if index + 1 < len(self._updates):
                next_update, _ = self._updates[index + 1]
                total = min(new_tokens, int(next_update - sequence.started + _EPSILON))
            if total > counted_tokens:
                _, version = self._updates[index]
                sequence.tokens[version] += total - counted_tokens
                counted_tokens = total
            if counted_tokens >= new_tokens:
                break
        sequence.left -= new_tokens
        self._stats.generated_tokens += new_tokens


class VirtualClient:
    """The trainer's inference client, for many engines: the one with the fewest sequences is next.

    Args:
        asleep: the indices of engines that get no sequences.
    """

    def __init__(self, engines: list[VirtualEngine], asleep: Collection[int] = ()) -> None:
        self.engines = engines
        self._in_flight = [0] * len(engines)  # sequences of each engine
        self._asleep = frozenset(asleep)
        # Heap of (sequences in flight, index). Outdated entries are skipped.
        self._by_load: list[tuple[int, int]] = []
        self._sort_by_load()

    def submit(self, prompt: int, tokens: int) -> Sequence:
        """Submit a sequence of so many tokens; ``done`` of it is set at its end."""
        sequence = Sequence(prompt, tokens, asyncio.get_running_loop().create_future())
        sequence.done.add_done_callback(lambda _: self._change_load(sequence.engine, -1))
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
        """Put engines to sleep; their sequences continue at the others."""
        self._asleep |= frozenset(engines)
        self._sort_by_load()
        for index in engines:
            engine = self.engines[index]
            engine.pause()
            engine.cut()
            for sequence in engine.withdraw(self._in_flight[index]):
                self._change_load(index, -1)
                self._assign(sequence, in_front=True)

    async def wake(self, engines: Collection[int]) -> None:
        """Wake engines; they get their share of the sequences that wait at others."""
        self._asleep -= frozenset(engines)
        self._sort_by_load()
        for index in engines:
            self.engines[index].resume()
        awake = len(self.engines) - len(self._asleep)
        share = -(-sum(self._in_flight) // awake)  # rounded up
        for index, engine in enumerate(self.engines):
            for sequence in engine.withdraw(self._in_flight[index] - share):
                self._change_load(index, -1)
                self._assign(sequence)

    async def waiting(self) -> int:
        return sum(stats.waiting for stats in await self.stats())

    async def stats(self) -> list[EngineStats]:
        return [engine.stats() for engine in self.engines]

    def set_version(self, version: int) -> None:
        for engine in self.engines:
            engine.set_version(version)

    def _assign(self, sequence: Sequence, *, in_front: bool = False) -> None:
        """Give a sequence to the engine with the fewest sequences."""
        load, index = heapq.heappop(self._by_load)
        while load != self._in_flight[index]:
            load, index = heapq.heappop(self._by_load)
        sequence.engine = index
        self._change_load(index, +1)
        self.engines[index].submit(sequence, in_front=in_front)

    def _change_load(self, index: int, change: int) -> None:
        self._in_flight[index] += change
        if index in self._asleep:
            return
        heapq.heappush(self._by_load, (self._in_flight[index], index))
        # Bounds the number of outdated entries.
        if len(self._by_load) > 4 * len(self.engines) + 64:
            self._sort_by_load()

    def _sort_by_load(self) -> None:
        self._by_load = []
        for index, load in enumerate(self._in_flight):
            if index not in self._asleep:
                self._by_load.append((load, index))
        heapq.heapify(self._by_load)
