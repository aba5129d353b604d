"""What the engines have made of requests that are not answered yet, for those who stream.

Invariant: however many streams there are, the engines are asked once in ``EVERY_S``, and never while there is none.
A round that has begun is carried through: what an engine tells once must not get lost.

| who waits       | for what                | woken by                                                              |
|-----------------|-------------------------|-----------------------------------------------------------------------|
| a stream        | the round that it is in | the round; or the end of its own request                              |
| a round (task)  | ``EVERY_S``, engines    | the clock, the engines' answers; their failure is told by the request |
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from skyasync.inference.interface import GenerationOutput

EVERY_S = 0.05
CLOSE_S = 5.0
Heard = dict[str, GenerationOutput]


class Teller(Protocol):
    async def progress(self, request_ids: Collection[str] | None = None) -> Heard: ...


class News:
    """Args: client: what asks the engines; one that cannot tells nothing, and answers are streamed when complete."""

    def __init__(self, client: Teller) -> None:
        self._client = client
        self._wanted: set[str] = set()
        self._round: asyncio.Task[Heard] | None = None

    def round(self, request_ids: Collection[str]) -> asyncio.Task[Heard]:
        """The round that goes on, or a new one: what is known of these requests, as far as it was asked for in time."""
        self._wanted |= set(request_ids)
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._ask())
        return self._round

    async def _ask(self) -> Heard:
        await asyncio.sleep(EVERY_S)
        wanted, self._wanted = self._wanted, set()
        try:
            return await self._client.progress(wanted)
        except Exception:  # the requests themselves will say so
            return {}

    async def close(self) -> None:
        """Nobody streams any more: a round that an engine holds up is left."""
        if self._round is not None:
            await asyncio.wait({self._round}, timeout=CLOSE_S)
            self._round.cancel()
