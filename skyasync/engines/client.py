"""One client in front of several engines: it routes, batches calls, and owns every wait.

Invariant: each request is answered exactly once or raises; one that no engine answers in time raises ``TimeoutError``
naming it. Requests made in one turn of the event loop travel to their engine in one message.

A request that ``cut`` has ended early, or whose engine has died, is continued here: prompt and tokens so far are sent
as a new request, which the engines start under whatever weights they have. Its caller sees one answer, with the
pieces joined (``pieces``).

An engine dies when a call of it raises ``EngineDiedError``, or when whoever listens for its heartbeat says so
(``Roster.lose``). Where there is a survivor nothing is asked of it any more, its requests go on at the others from the
tokens that are known of them (``hear``), and where there is no other they wait for the one that is admitted in its
place. Else, and for every other error, the requests that the engine had raise it.

While every engine is full (``routes``) requests wait here, in a line: nobody in it is overtaken. It moves when a
request ends, an engine is admitted, or one says that it has room (``hear``).

| who waits                | for what                       | woken by                                            |
|--------------------------|--------------------------------|-----------------------------------------------------|
| ``generate``             | its piece's future             | ``_carry`` (answer, error), ``bereave``, or timeout |
| a piece without engine   | the future, as above           | ``_advance``, ``give_up``, or its timeout           |
| ``_carry`` (a task each) | the engine's stream of answers | the engine; its failure fails the futures; a loss   |
| a call of all engines    | every living engine's answer   | the engines; a loss                                 |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from skyasync.arrays import TURN_TOKENS
from skyasync.engines.pieces import Ends, Piece, Unanswered, continuation, join
from skyasync.engines.protocol import (
    EngineDiedError,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
    RequestFailedError,
)
from skyasync.engines.roster import Loss, Roster
from skyasync.weight_sync.update import WakePart, WeightUpdate


class Mail(NamedTuple):
    """What an engine is told in one turn of the event loop."""

    pieces: list[Piece]
    abandoned: list[str]  # requests whose answers nobody waits for any more: the engine need not compute them


class InferenceClient:
    """Routes to the engine that would be done first (``routes``); a session stays where it began.

    Args:
        engines: at least one; they hold the same weights.
        request_timeout_s: how long a request may go unanswered, pauses of the engines included.
        tokenizer: gives the model's; needed where requests with stop strings are cut.
        start_at_once: engines that load at the same time, in order; 0 is all. Those that share a device measure what
            memory is free on it when they load, and must do so one after the other.

    Attributes:
        roster: the engines, and which of them live.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        request_timeout_s: float = 600.0,
        tokenizer: Callable[[], Any] | None = None,
        start_at_once: int = 0,
    ) -> None:
        if not engines:
            raise ValueError("an inference client needs at least one engine")
        self.request_timeout_s = request_timeout_s
        self.roster = Roster(engines, self)
        self._start_at_once = start_at_once or len(engines)
        self._ends = Ends(tokenizer)
        self._outbox: dict[int, Mail] = {}  # engine -> of this turn
        self._line: dict[Piece, None] = {}  # those that have no engine yet, who came first at the front
        self._hearing = [asyncio.Lock() for _ in engines]
        self._pieces = Unanswered()
        self._cut: set[str] = set()  # the engines' ids of what has been ended early, and goes on
        self._paused = False
        self._cutting = False  # from a cut to the end of its pause

    @property
    def engines(self) -> list[InferenceEngine]:
        return self.roster.engines

    @property
    def proves_weights(self) -> bool:
        """Whether every engine compares what it holds with digests of what was sent."""
        return all(getattr(engine, "proves_weights", True) for engine in self.engines)

    async def start(self) -> None:
        for first in range(0, len(self.engines), self._start_at_once):
            wave = self.engines[first : first + self._start_at_once]
            await asyncio.gather(*(engine.start() for engine in wave))
        try:
            async with asyncio.timeout(self.request_timeout_s):
                self.roster.routes.capacity = [each.cache_tokens for each in await self.stats()]
        except TimeoutError as error:
            raise TimeoutError(
                f"all engines have started, but one did not answer a request for its state within "
                f"{self.request_timeout_s:g} s (generator.request_timeout_s); their logs are in the run's folder"
            ) from error

    async def generate(self, request: GenerationRequest, begun: GenerationOutput | None = None) -> GenerationOutput:
        """Answer one request, and have what is ended early continued.

        Args:
            begun: a part of the answer, as if it had been cut.

        Raises:
            TimeoutError: naming the request, after ``request_timeout_s``.
            ValueError: if a request with this id is in flight already.
            RequestFailedError: if this request cannot be answered; the engines go on.
            Exception: whatever the engine raised, with its traceback.
        """
        answer = begun if begun is not None else await self._piece(request, request.request_id)
        try:
            while answer.finish_reason == "abort" and answer.request_id in self._cut:
                self._cut.discard(answer.request_id)
                self._pieces.before[request.request_id] = answer
                more = await self._piece(continuation(request, answer), request.request_id)
                answer = self._ends.of(request, join(answer, more), seen=len(answer.token_ids))
        finally:
            self._pieces.before.pop(request.request_id, None)
        self._cut.discard(answer.request_id)
        return replace(answer, request_id=request.request_id)

    async def go_on(self, request: GenerationRequest, begun: GenerationOutput) -> GenerationOutput:
        """Answer a request of which there is a part; it may be whole (it has a ``finish_reason``). As ``generate``."""
        if begun.finish_reason or len(begun.token_ids) >= request.sampling.max_tokens:
            return replace(begun, request_id=request.request_id, finish_reason=begun.finish_reason or "length")
        self._cut.add(request.request_id)
        return await self.generate(request, replace(begun, request_id=request.request_id, finish_reason="abort"))

    async def progress(self, request_ids: Collection[str] | None = None) -> dict[str, GenerationOutput]:
        """What the living engines have of these unanswered requests (of all: None), by their ids."""
        await asyncio.gather(*(self.hear(index) for index in self.roster.routes.living))
        return self._pieces.so_far(request_ids)

    async def _piece(self, request: GenerationRequest, caller_id: str) -> GenerationOutput:
        """What an engine answers to a request or to its continuation."""
        if request.request_id in self._pieces:
            raise ValueError(f"request {request.request_id} is in flight already: its id must be its own")
        piece = Piece(request, caller_id, asyncio.get_running_loop().create_future())
        self._post(piece)
        self._pieces[request.request_id] = piece
        if self._cutting:  # it may arrive in front of the engine's end of all requests, or behind it
            self._cut.add(request.request_id)
        try:
            async with asyncio.timeout(self.request_timeout_s) as timer:
                return await piece.future
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise TimeoutError(
                f"request {request.request_id} was not answered within {self.request_timeout_s:g} s "
                f"(generator.request_timeout_s)"
            ) from error
        finally:
            del self._pieces[request.request_id]
            self._line.pop(piece, None)
            if piece.charge is not None:
                if piece.abandoned:
                    self._post(piece, leaves=True)
                    self._pieces.leaving.add(request.request_id)
                self.roster.routes.ended(piece.charge, piece.answer, asyncio.get_running_loop().time())
            if self._line:
                self._advance()

    # ---------------------------------------------------------------- all engines

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Per living engine, the log-probability of each token after the first."""
        return list((await self.roster.all("score", sequences)).values())

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._paused = True
        await self.roster.all("pause", mode)

    async def cut(self) -> None:
        """Pause, and end what is in flight; ``generate`` continues it after ``resume``. No token is lost."""
        self._cut.update(self._pieces)
        self._cutting = True
        await self.pause("abort")

    async def resume(self) -> None:
        self._paused = self._cutting = False
        await self.roster.all("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (all of them: None) for good, also if they had been cut."""
        if request_ids is not None:
            wanted = set(request_ids)
            request_ids = [name for name, piece in self._pieces.items() if piece.caller_id in wanted]
        ended = list(self._pieces if request_ids is None else request_ids)
        self._cut.difference_update(ended)
        for piece in [self._pieces[name] for name in ended]:
            if piece.engine is None and not piece.future.done():
                piece.future.set_result(piece.so_far)
        await self.roster.all("abort", request_ids)

    async def update_weights(self, update: WeightUpdate) -> list[str]:
        """As the protocol says, of all engines."""
        self.roster.routes.forget_prompts()
        if "members" in update.info:  # both ends meet in a group
            await self.roster.all_or_none(update.info["members"], "update_weights", update)
            return []
        answers = await self.roster.all("update_weights", update)
        return sorted({name for unproven in answers.values() for name in unproven or ()})

    async def sleep(self) -> None:
        await self.roster.all("sleep")

    async def wake(self, part: WakePart) -> None:
        await self.roster.all("wake", part)

    async def stats(self) -> list[EngineStats]:
        """Per engine, by its place; nothing but zeros for one that is dead."""
        found, gone = await self.roster.all("stats"), self.roster.routes.gone
        return [found.get(index, EngineStats(gone=index in gone)) for index in range(len(self.engines))]

    async def shutdown(self) -> None:
        await asyncio.sleep(0)  # a carrier that is cancelled before it begins would answer nobody
        asking = self.roster.asking
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, *(engine.shutdown() for engine in self.engines), return_exceptions=True)
        self._fail_all(_shareable(asyncio.CancelledError()))  # what had no engine

    # ---------------------------------------------------------------- life and death

    async def hear(self, index: int) -> None:
        """Ask an engine for its news, and keep them: a sign of life, and what its requests go on from."""
        if not hasattr(self.engines[index], "progress"):
            await self.roster.ask(index, self.engines[index].stats())
            return
        async with self._hearing[index]:
            asked, leaving = self._pieces.at(index), set(self._pieces.leaving)
            try:
                answer = await self.roster.ask(index, self.engines[index].progress())
            except BaseException:
                for piece in (*asked.values(), *self._pieces.at(index).values()):
                    piece.forget()  # they may have been told to nobody
                raise
            self._pieces.hear(asked, answer[0] if answer else (), leaving)
        if self.roster.routes.capacity[index] and answer:
            said = await self.roster.ask(index, self.engines[index].stats())
            if said:
                self.roster.routes.seen(index, said[0])
                self._advance()

    def bereave(self, index: int) -> Loss:
        """An engine has died: what it had goes on elsewhere."""
        self._outbox.pop(index, None)
        lost = [piece for piece in self._pieces.at(index).values() if not piece.future.done()]
        answers = [piece.so_far for piece in lost]
        for piece, answer in zip(lost, answers, strict=True):
            self._cut.add(answer.request_id)
            piece.future.set_result(answer)
        return Loss(len(lost), sum(len(answer.token_ids) for answer in answers))

    async def admit(self, index: int, engine: InferenceEngine) -> None:
        """This engine, which holds the weights of the others, takes the place of the dead one."""
        paused = False
        while paused != self._paused:
            paused = self._paused
            await (engine.pause("keep") if paused else engine.resume())
        self.roster.admit(index, engine)
        self._advance()

    async def join(self, engine: InferenceEngine) -> int:
        """As ``admit``, in a place of its own, whose number is returned."""
        room = (await engine.stats()).cache_tokens
        index = self.roster.add(engine)
        self._hearing.append(asyncio.Lock())
        self.roster.routes.capacity[index] = room
        await self.admit(index, engine)
        return index

    async def let_go(self, index: int, patience_s: float) -> int:
        """This engine gets nothing any more, and what it has goes on at the others; the number of such requests."""
        self.roster.routes.dead.add(index)
        self.roster.routes.gone.add(index)
        leaving = self._pieces.at(index)
        self._cut.update(leaving)
        with contextlib.suppress(Exception):  # it may die meanwhile, or hang: then from what is known of them
            async with asyncio.timeout(patience_s):
                await self.engines[index].abort(list(leaving))
                await asyncio.gather(*(asyncio.wait({piece.future}) for piece in leaving.values()))
        self.bereave(index)
        return len(leaving)

    def give_up(self, error: BaseException) -> None:
        """No engine will answer any more: that is what every request and call hears."""
        self.roster.end = error
        self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        for piece in self._pieces.values():
            if not piece.future.done():
                piece.future.set_exception(error)

    # ---------------------------------------------------------------- mail

    def _post(self, piece: Piece, *, leaves: bool = False) -> None:
        """Send it to an engine, if one lives, with this turn's mail, which is carried there in the next one.

        Args:
            leaves: it has an engine, which is told that nobody waits for it any more.
        """
        if not leaves:
            if self.roster.end is not None:
                raise self.roster.end
            now = asyncio.get_running_loop().time()
            piece.charge = None if self._line else self.roster.routes.choose(piece.request, now)
        if piece.charge is None:
            self._line[piece] = None
        else:
            self._mail(piece.charge.engine, piece, leaves=leaves)

    def _advance(self) -> None:
        """Send whoever is first in the line, for as long as there is an engine for it."""
        while self._line:
            piece = next(iter(self._line))
            if not piece.future.done():
                piece.charge = self.roster.routes.choose(piece.request, asyncio.get_running_loop().time())
                if piece.charge is None:
                    return
                self._mail(piece.charge.engine, piece, leaves=False)
            del self._line[piece]

    def _mail(self, index: int, piece: Piece, *, leaves: bool) -> None:
        if index not in self._outbox:
            self._outbox[index] = Mail([], [])
            self.roster.track(index, asyncio.get_running_loop().create_task(self._carry(index)))
        if leaves:
            self._outbox[index].abandoned.append(piece.request.request_id)
        else:
            self._outbox[index].pieces.append(piece)

    async def _carry(self, index: int) -> None:
        mail = self._outbox.pop(index)
        waiting = {piece.request.request_id: piece for piece in mail.pieces if not piece.future.done()}
        try:
            if mail.abandoned:
                with contextlib.suppress(Exception):  # an engine that has failed tells those who still wait
                    await self.engines[index].abort(mail.abandoned)
                self._pieces.leaving.difference_update(mail.abandoned)
            if not waiting:
                return
            async for outputs in self.engines[index].generate([piece.request for piece in waiting.values()]):
                told = 0
                for output in outputs:
                    future = waiting.pop(output.request_id).future
                    if not future.done():  # its caller may have been cancelled
                        if output.finish_reason == "error":
                            future.set_exception(RequestFailedError(output.error))
                        else:
                            future.set_result(output)
                    told += len(output.token_ids)
                    if told >= TURN_TOKENS:  # those who are answered have work to do, and others want their turn
                        told = 0
                        await asyncio.sleep(0)
            if waiting:
                raise RuntimeError(f"engine {index} ended without answering {', '.join(sorted(waiting)[:5])}")
        except BaseException as error:
            if isinstance(error, EngineDiedError) and self.roster.lose(index, error, asyncio.current_task()):
                return
            for piece in waiting.values():
                if not piece.future.done():
                    piece.future.set_exception(_shareable(error))
            if not isinstance(error, Exception):
                raise


def _shareable(error: BaseException) -> BaseException:
    return RuntimeError("the inference client was shut down") if isinstance(error, asyncio.CancelledError) else error
