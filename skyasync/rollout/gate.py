"""A gate that keeps new rollouts out while something needs the engines without them.

Invariant: while ``closed`` is held no rollout is inside, and every rollout that waits outside is let in after it.

| who waits          | for what                  | woken by                                  |
|--------------------|---------------------------|-------------------------------------------|
| a rollout entering | the gate to open          | the end of the last ``closed``            |
| ``closed``         | rollouts inside to leave  | the last of them; it waits for no trainer |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RolloutGate:
    """Open at first. An open gate is passed without giving up the turn of the event loop."""

    def __init__(self) -> None:
        self._inside = 0
        self._holders = 0
        self._opened, self._emptied = asyncio.Event(), asyncio.Event()
        self._emptied.set()

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        while self._holders:
            await self._opened.wait()
        self._inside += 1
        self._emptied.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._emptied.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Let no rollout in, and wait until those inside have left."""
        self._holders += 1
        self._opened.clear()
        try:
            await self._emptied.wait()
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._opened.set()
