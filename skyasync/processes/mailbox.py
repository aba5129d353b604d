"""Answers on their way back: collected in small batches, as they come.

Invariant: every answer put in is collected exactly once. Whoever collects waits at most ``patience_s``; a later
collector takes the place of an earlier one, which then returns with nothing.

The answers to a message's ``init`` calls are held until all of them are there (at most ``HOLD_S``): the engine then
gets the episodes' first requests together, so that what it computes does not depend on the timing of threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from skyasync.processes.calls import Answer, Call

LINGER_S = 0.005
HOLD_S = 0.25


class Mailbox:
    """Belongs to the running event loop; ``put`` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._open: set[int] = set()  # numbers of the calls that are not answered
        self._held: set[int] = set()
        self._held_until = 0.0
        self._armed = False
        self._ready: asyncio.Event | None = None

    def expect(self, calls: Sequence[Call]) -> None:
        """These calls will be answered."""
        with self._lock:
            self._open.update(call.number for call in calls)
            if not self._held:
                self._held = {call.number for call in calls if call.method == "init"}
                self._held_until = time.monotonic() + HOLD_S

    def put(self, answer: Answer) -> None:
        with self._lock:
            self._answers.append(answer)
            self._open.discard(answer.number)
            self._held.discard(answer.number)
            last, arm = not self._open, not self._armed
            self._armed = True
        with suppress(RuntimeError):  # the loop is closed: nobody collects any more
            if last:
                self._loop.call_soon_threadsafe(self._deliver)
            elif arm:
                self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, self._deliver)

    async def collect(self, patience_s: float) -> list[Answer]:
        if self._ready is not None:
            self._ready.set()
        ready = self._ready = asyncio.Event()
        if self._answers and not self._armed:
            ready.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await ready.wait()
        if self._ready is not ready:
            return []
        self._ready = None
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def _deliver(self) -> None:
        with self._lock:
            if self._held and time.monotonic() < self._held_until:
                self._loop.call_later(LINGER_S, self._deliver)
                return
            self._held, self._armed = set(), False
            ready = self._ready if self._answers else None
        if ready is not None:
            ready.set()
