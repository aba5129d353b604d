"""One client in front of several engines: it routes, batches calls, and owns every wait.

Invariant: each request is answered exactly once or raises; a request whose engine fails raises that
engine's error, and one that no engine answers in time raises ``TimeoutError`` naming it. Requests made in
one turn of the event loop travel to their engine in one message.

| who waits                | for what                      | woken by                                   |
|--------------------------|-------------------------------|--------------------------------------------|
| ``generate``             | its request's future          | ``_carry`` (answer, error), or its timeout |
| ``_carry`` (a task each) | the engine's stream of answers| the engine; its failure fails the futures  |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from skyasync.engines.protocol import (
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
)
from skyasync.weight_sync.update import WeightUpdate


class InferenceClient:
    """Routes to the engine with the fewest requests in flight; a session stays where it began.

    Args:
        engines: at least one; they hold the same weights.
        request_timeout_s: how long ``generate`` may go unanswered while the engines are not paused.
    """

    def __init__(self, engines: Sequence[InferenceEngine], request_timeout_s: float = 600.0) -> None:
        if not engines:
            raise ValueError("an inference client needs at least one engine")
        self.engines = list(engines)
        self.request_timeout_s = request_timeout_s
        self._in_flight = [0] * len(engines)
        self._sessions: dict[str, tuple[int, int]] = {}  # session -> (engine, requests in flight)
        self._outbox: dict[int, list[tuple[GenerationRequest, asyncio.Future[GenerationOutput]]]] = {}
        self._carriers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._everywhere(lambda engine: engine.start())

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Answer one request.

        Raises:
            TimeoutError: naming the request, after ``request_timeout_s``.
            Exception: whatever the engine raised, with its traceback.
        """
        index = self._choose(request.session_id)
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        self._post(index, request, future)
        try:
            async with asyncio.timeout(self.request_timeout_s):
                return await future
        except TimeoutError as error:
            raise TimeoutError(
                f"request {request.request_id} was not answered within {self.request_timeout_s:g} s "
                f"(generator.request_timeout_s)"
            ) from error
        finally:
            self._release(index, request.session_id)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Per engine, the log-probability of each token after the first."""
        return await self._everywhere(lambda engine: engine.score(sequences))

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._everywhere(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._everywhere(lambda engine: engine.resume())

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._everywhere(lambda engine: engine.abort(request_ids))

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._everywhere(lambda engine: engine.update_weights(update))

    async def sleep(self) -> None:
        await self._everywhere(lambda engine: engine.sleep())

    async def wake(self) -> None:
        await self._everywhere(lambda engine: engine.wake())

    async def stats(self) -> list[EngineStats]:
        return await self._everywhere(lambda engine: engine.stats())

    async def shutdown(self) -> None:
        for task in self._carriers:
            task.cancel()
        await asyncio.gather(*(engine.shutdown() for engine in self.engines), return_exceptions=True)

    async def _everywhere(self, call: Callable[[InferenceEngine], Awaitable[Any]]) -> list[Any]:
        return list(await asyncio.gather(*(call(engine) for engine in self.engines)))

    def _choose(self, session_id: str | None) -> int:
        index = min(range(len(self.engines)), key=self._in_flight.__getitem__)
        if session_id is not None:
            index, count = self._sessions.get(session_id, (index, 0))
            self._sessions[session_id] = (index, count + 1)
        self._in_flight[index] += 1
        return index

    def _release(self, index: int, session_id: str | None) -> None:
        self._in_flight[index] -= 1
        if session_id is not None:
            _, count = self._sessions.pop(session_id)
            if count > 1:
                self._sessions[session_id] = (index, count - 1)

    def _post(self, index: int, request: GenerationRequest, future: asyncio.Future[GenerationOutput]) -> None:
        if index not in self._outbox:
            self._outbox[index] = []
            asyncio.get_running_loop().call_soon(self._dispatch, index)
        self._outbox[index].append((request, future))

    def _dispatch(self, index: int) -> None:
        carrier = asyncio.get_running_loop().create_task(self._carry(index, self._outbox.pop(index)))
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)

    async def _carry(
        self, index: int, letters: list[tuple[GenerationRequest, asyncio.Future[GenerationOutput]]]
    ) -> None:
        waiting = {request.request_id: future for request, future in letters}
        try:
            async for outputs in self.engines[index].generate([request for request, _ in letters]):
                for output in outputs:
                    _answer(waiting.pop(output.request_id), output)
            if waiting:
                raise RuntimeError(f"engine {index} ended without answering {', '.join(sorted(waiting)[:5])}")
        except BaseException as error:
            for future in waiting.values():
                if not future.done():
                    future.set_exception(_shareable(error))
            if not isinstance(error, Exception):
                raise


def _answer(future: asyncio.Future[GenerationOutput], output: GenerationOutput) -> None:
    if not future.done():  # its caller may have been cancelled
        future.set_result(output)


def _shareable(error: BaseException) -> BaseException:
    return RuntimeError("the inference client was shut down") if isinstance(error, asyncio.CancelledError) else error
