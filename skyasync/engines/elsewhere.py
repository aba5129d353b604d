"""A server that somebody else has started, behind the engines' protocol: what does not depend on whose server it is.

Invariant: a token's version is the one that the server's core stamped it with, and a stamp that this run did not set
is a death: the server was started anew, or another run uses it. The server is left as it was found, but for its
weights.

Requests that have begun keep their cache over an update, those without a token are sent again, and prompts are salted
with the version, so that none finds blocks that other weights have computed.

| who waits               | for what               | woken by                                                     |
|-------------------------|------------------------|--------------------------------------------------------------|
| ``generate``, ``score`` | the server's answer    | the server; a broken connection (``EngineDiedError``)        |
| control calls           | the same, each other   | the same                                                     |
| ``start``               | the server             | the server; ``engine_start_timeout_s``                       |
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self
from uuid import uuid4

from skyasync.arrays import floats, ints
from skyasync.engines.http import Begun, Server, versions_of
from skyasync.engines.protocol import (
    EngineConfig,
    EngineDiedError,
    EngineStats,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PauseMode,
    RequestFailedError,
    refusal,
)
from skyasync.engines.stopwatch import Stopwatch
from skyasync.errors import UserError
from skyasync.together import within
from skyasync.weight_sync.update import CurrentContent, WakePart, WeightSyncError, WeightUpdate

AGAIN_S = 1.0  # between two looks whether a server has come back


class ServerEngine(ABC):
    """See ``InferenceEngine`` for the methods. ``config.extra``: ``url``; ``key``, if it wants one; ``start_s``: how
    long its start may take; ``returns``: it has died, and may stay away until then."""

    kind: ClassVar[str]  # whose server it is, in messages
    dead: ClassVar[Sequence[str]] = ()  # by which words of a refusal it says that its core is no more
    info: ClassVar[Mapping[str, str]] = {}  # with which it is asked what it is

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.version = config.version
        self._server = Server(self.kind, config.extra["url"], config.extra.get("key", ""), self.dead)
        self._run = uuid4().hex  # whose versions these are: the server may have served others
        self._begun: dict[str, Begun] = {}
        self._tasks: set[asyncio.Task[GenerationOutput]] = set()
        self._finished_tokens = self._cache_tokens = 0
        self._busy, self._paused = Stopwatch(), Stopwatch()
        self._control = asyncio.Lock()
        self._held = CurrentContent()
        self._closing: asyncio.Future[None] | None = None

    # -- what a kind of server does in a way of its own ---------------------------------------------------

    @abstractmethod
    def complaint(self, info: Mapping[str, Any]) -> str:
        """What keeps the server from being an engine, by what it says of itself; empty if nothing does."""

    @abstractmethod
    def room(self, info: Mapping[str, Any]) -> int:
        """Tokens that its cache holds; 0 where it does not say."""

    @abstractmethod
    async def _used(self) -> int | None:
        """Tokens of its cache that running requests take; None where it does not say."""

    @abstractmethod
    async def _set_back(self) -> None:
        """End what a run before may have left, a pause and requests, and set ``version``."""

    @abstractmethod
    async def _play(self, begun: Begun) -> GenerationOutput:
        """Ask for a request, and hear its answer (``begun.hear``) to its end (``_ended``)."""

    @abstractmethod
    async def _end(self, chosen: Collection[Begun]) -> None:
        """Have the server end these requests."""

    @abstractmethod
    async def _alive(self) -> None:
        """Raises EngineDiedError unless the server's core is between two steps."""

    @abstractmethod
    async def _scored(self, sequence: Sequence[int]) -> list[float] | None:
        """Log-probabilities of each token after the first; None if it was cut before the server had them."""

    @abstractmethod
    async def _stop(self, mode: PauseMode) -> None:
        """Have it pause."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Undo that."""

    @abstractmethod
    async def _load(self, update: WeightUpdate) -> list[str] | None:
        """Have it take the weights, paused as it is, and stamp their version."""

    # -- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find it fit, and set back what a run before may have left: a pause, requests."""
        start = f"the start of engine {self.config.extra['url']}"
        async with within(self.config.extra["start_s"], start, "generator.engine_start_timeout_s"):
            await self._take_over(await self._info())

    async def _info(self) -> dict[str, Any]:
        """What it says of itself; a successor is waited for."""
        while True:
            try:
                info: dict[str, Any] = await self._server.get("/server_info", **self.info)
                return info
            except EngineDiedError as error:
                if not self.config.extra.get("returns"):
                    raise UserError(f"generator.engines: {error}") from error
                await asyncio.sleep(AGAIN_S)

    async def _take_over(self, info: dict[str, Any]) -> None:
        if problem := self.complaint(info):
            raise UserError(problem)
        self._cache_tokens = self.room(info)
        await self._set_back()

    async def shutdown(self) -> None:
        """The server goes on; what this run has asked of it does not."""
        for task in list(self._tasks):
            task.cancel()
        if self._paused.on:
            with contextlib.suppress(Exception):
                await self._resume()
        await self._server.close()

    def kill(self) -> None:
        """Hang up. Nothing here is to be ended: whoever started the server sees to it."""
        for task in list(self._tasks):
            task.cancel()
        self._closing = asyncio.ensure_future(self._server.close())

    def successor(self) -> Self:
        """The same address, once a server answers there again."""
        extra = {**self.config.extra, "returns": True}
        return type(self)(replace(self.config, version=self.version, extra=extra))

    # -- requests -----------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[GenerationOutput]]:
        finished: asyncio.Queue[asyncio.Task[GenerationOutput]] = asyncio.Queue()
        mine = [asyncio.create_task(self._answered(request)) for request in requests]
        self._tasks.update(mine)
        for task in mine:
            task.add_done_callback(finished.put_nowait)
        unanswered = len(mine)
        try:
            while unanswered:
                done = [await finished.get()]
                while not finished.empty():
                    done.append(finished.get_nowait())
                unanswered -= len(done)
                yield [task.result() for task in done]
        finally:
            for task in mine:
                task.cancel()
                self._tasks.discard(task)
                if task.done() and not task.cancelled():
                    task.exception()  # it may be one of many that a server's death has ended

    async def _answered(self, request: GenerationRequest) -> GenerationOutput:
        """What the server refuses is that request's affair alone."""
        try:
            return await self._answer(request)
        except EngineDiedError:
            raise
        except Exception as error:
            return refusal(request, RequestFailedError(str(error)))

    async def _answer(self, request: GenerationRequest) -> GenerationOutput:
        """Ask until it is answered: what a weight update found without a token is sent again."""
        name = request.request_id
        while True:
            begun = self._begun[name] = Begun(request, self.version)
            self._watch()
            begun.playing = asyncio.create_task(self._play(begun))
            try:
                await asyncio.wait({begun.playing})
                if not begun.left:
                    return begun.playing.result()
                if begun.left == "ended":
                    return GenerationOutput(name, finish_reason="abort")
            finally:
                begun.playing.cancel()
                del self._begun[name]
                self._watch()

    def _ended(self, begun: Begun, reason: FinishReason, spans: Any) -> GenerationOutput:  # noqa: ANN401  (JSON)
        """The whole answer.

        Args:
            spans: by the server, of which version its tokens are.
        """
        name, count = begun.request.request_id, len(begun.tokens)
        versions = versions_of(spans, count)
        if versions is None:
            raise self._server.died(
                "it reports a weight version that this run never sent: it was restarted, or another run uses it"
            )
        self._finished_tokens += count
        return GenerationOutput(name, ints(begun.tokens), floats(begun.logprobs), versions, reason)

    def _salt(self, version: int) -> str:
        """Keeps a prompt from finding blocks that other weights have computed."""
        return f"run {self._run} version {version}"

    async def progress(self) -> list[GenerationOutput]:
        """As the protocol says; of a request that has lived through an update only the tokens from before it."""
        await self._alive()
        return [news for begun in self._begun.values() if (news := begun.news())]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As the protocol says; waits for ``resume`` while paused. Sequences are shorter than ``max_model_len``."""
        return await asyncio.gather(*(self._score(sequence) for sequence in sequences))

    async def _score(self, sequence: Sequence[int]) -> list[float]:
        if len(sequence) < 2:
            return []
        while True:  # until neither a weight update nor pause("abort") has cut it
            scores = await self._scored(sequence)
            if scores is not None:
                return scores

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        names = set(self._begun if request_ids is None else request_ids)
        chosen = [begun for name, begun in self._begun.items() if name in names]
        for begun in chosen:
            if not begun.tokens:
                begun.leave("ended")
        if at_the_server := [begun for begun in chosen if begun.tokens]:
            await self._end(at_the_server)

    # -- control ------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        async with self._control:
            await self._pause(mode)

    async def resume(self) -> None:
        async with self._control:
            await self._resume()

    async def _pause(self, mode: PauseMode) -> None:
        await self._stop(mode)
        self._paused.switch(True)
        self._watch()

    async def _resume(self) -> None:
        await self._go_on()
        self._paused.switch(False)
        self._watch()

    async def update_weights(self, update: WeightUpdate) -> list[str] | None:
        """As the protocol says; a server that is not paused is paused ("keep") for the update."""
        if update.backend != "shared_memory":
            raise UserError(f"servers of generator.engines take weights from a file, not by {update.backend}")
        self._held.begin(update)
        async with self._control:
            was_paused = self._paused.on
            if not was_paused:
                await self._pause("keep")
            unproven = await self._transfer(update)
            self.version = update.version
            self._held.complete(update)
            self._outlive()
            if not was_paused:
                await self._resume()
            return unproven

    async def _transfer(self, update: WeightUpdate) -> list[str] | None:
        """Raises WeightSyncError where the server lives and has not taken them: it may have layers without weights."""
        try:
            return await self._load(update)
        except (EngineDiedError, RuntimeError) as error:  # some hang up on what they did not foresee
            await self._alive()
            raise WeightSyncError(
                f"{self._server.name} has refused the weights of version {update.version} (its own log says why) and "
                f"must be started anew: {error}"
            ) from error

    def _outlive(self) -> None:
        """What is in flight goes on with its cache, and what has no token yet begins with the new weights."""
        for begun in self._begun.values():
            if not begun.tokens:
                begun.leave("again")
            elif begun.certain is None:
                begun.certain = len(begun.tokens)

    async def sleep(self) -> None:
        raise UserError("generator.engines: servers elsewhere share no devices with the policy, and do not sleep")

    async def wake(self, part: WakePart) -> None:
        raise UserError("generator.engines: servers elsewhere share no devices with the policy, and do not sleep")

    # -- watching -----------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        counts = [len(begun.tokens) for begun in self._begun.values()]
        running = sum(map(bool, counts))
        return EngineStats(
            running=running,
            waiting=len(counts) - running,
            generated_tokens=self._finished_tokens + sum(counts),
            busy_s=self._busy.seconds,
            paused_s=self._paused.seconds,
            cache_tokens=self._cache_tokens,
            cache_used=await self._used() if self._cache_tokens else None,
        )

    def _watch(self) -> None:
        self._busy.switch(bool(self._begun) and not self._paused.on)
