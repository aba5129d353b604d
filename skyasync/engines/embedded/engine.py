"""The embedded engine: transformers' models under a decode loop of ours, in one thread.

Invariant: the model, the decoder and every request belong to the engine's thread. The event loop only posts
commands, which run between two tokens; hence a swap of weights, a pause or an abort needs no locks, and what
``pause`` has answered is true. Every request is answered once: with its output, or with the error that ended
the engine.

Why a loop of ours over the library's models and caches, and neither of its own cores: a prompt is computed once for
all its samples, finished rows leave the batch, new requests join between two tokens, and the cache is not copied at
every token. On one core, 0.45 M parameters, tokens per CPU second (``python -m benchmarks.embedded_engine``):

    core                              64 requests    1024 requests    1024 in groups of 16
    ``generate`` with hooks                 5,500            5,200                   5,200
    continuous batching manager               510              570                     580
    this engine                             6,400           10,900                  19,300
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TypeVar

from skyasync.engines.embedded.core import EmbeddedCore, Reply
from skyasync.engines.protocol import (
    ENGINES,
    EngineConfig,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    PauseMode,
)
from skyasync.errors import UserError
from skyasync.weight_sync.update import WakePart, WeightUpdate

T = TypeVar("T")


@ENGINES.register(
    "transformers",
    sleeps_on=("cpu", "gpu"),
    computes_on_mapped_weights=True,
    takes_changes=True,
    takes_adapters=("layers", "head"),
    returns_experts=True,
    hands_back=True,
)
class TransformersEngine:
    """An ``InferenceEngine`` in this process, on one GPU or on CPU threads.

    A response ends with ``finish_reason="length"`` at ``max_tokens`` or when prompt and response together have
    ``max_model_len`` tokens, whichever comes first. A batch computes attention over its longest sequence:
    sequences of very different lengths are better served by vLLM.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._core: EmbeddedCore | None = None
        self._thread: ThreadPoolExecutor | None = None  # of one: commands and steps, one at a time

    async def start(self) -> None:
        self._thread = ThreadPoolExecutor(1, "transformers engine")
        await self._call(self._load, self._thread)

    async def generate(
        self, requests: Sequence[GenerationRequest], *, streamed: bool = False
    ) -> AsyncGenerator[list[GenerationOutput], None]:
        """See the protocol. FullTensors the iteration early aborts what is unanswered.

        Args:
            streamed: give what is new of each request at every token; only its last output has a ``finish_reason``.

        Raises:
            UserError: if two have one id; none of ``requests`` is started then.
        """
        reply = Reply()
        unanswered = {request.request_id for request in requests}
        await self._call(lambda: self._loaded.submit(requests, reply, streamed))
        try:
            while unanswered:
                message = await reply.queue.get()
                if isinstance(message, BaseException):
                    unanswered.clear()
                    raise message
                unanswered -= {output.request_id for output in message if output.finish_reason}
                yield message
        finally:
            if unanswered and self._thread is not None:
                self._thread.submit(lambda: self._loaded.abort(list(unanswered)))

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """Yield what is new since the last yield; only the last one has a ``finish_reason``. No client calls it."""
        async with aclosing(self.generate([request], streamed=True)) as news:
            async for outputs in news:
                for output in outputs:
                    yield output

    async def progress(self) -> list[GenerationOutput]:
        return await self._call(lambda: self._loaded.progress())

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        for sequence in sequences:
            if len(sequence) > self._config.max_model_len:
                raise UserError(
                    f"a sequence to be scored has {len(sequence)} tokens; max_model_len is {self._config.max_model_len}"
                )
        return await self._call(lambda: self._loaded.score(sequences))

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See the protocol. A drain ("wait") that ``resume`` or another pause overtakes ends early."""
        await asyncio.wrap_future(await self._call(lambda: self._loaded.pause(mode)))

    async def resume(self) -> None:
        await self._call(lambda: self._loaded.resume())

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._call(lambda: self._loaded.abort(request_ids))

    async def update_weights(self, update: WeightUpdate) -> None:
        """See the protocol; needs no pause: the swap happens between two tokens, and the cache is kept."""
        core = await self._call(lambda: self._loaded)
        received = await asyncio.to_thread(core.read, update)  # also of weights that are then rejected: others send it
        await self._call(lambda: self._loaded.update_weights(update, received))

    async def held_version(self) -> int:
        """The policy version of the weights that it has; -1 if nobody knows."""
        return await self._call(lambda: self._loaded.held_version())

    async def hand_back(self, folder: str) -> str:
        """Write them to a file of ``folder``, or of this machine's memory, which the caller removes; its path."""
        return await self._call(lambda: self._loaded.hand_back(folder))

    async def sleep(self) -> None:
        await self._call(lambda: self._loaded.sleep())

    async def wake(self, part: WakePart) -> None:
        """Nothing to undo: the next request allocates its cache."""
        await self._call(lambda: self._loaded)

    async def stats(self) -> EngineStats:
        return self._running.stats()

    async def shutdown(self) -> None:
        """End the thread; whoever still waits for an answer gets an error."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._core is not None:
            ended = RuntimeError("the engine was shut down before the request was answered")
            await asyncio.get_running_loop().run_in_executor(thread, self._core.fail, ended)
        await asyncio.to_thread(thread.shutdown)
        self._core = None

    @property
    def _running(self) -> EmbeddedCore:
        if self._core is None:
            raise RuntimeError("the engine is not running: it has not been started, or was shut down")
        return self._core

    @property
    def _loaded(self) -> EmbeddedCore:
        """As commands find it. Raises the error that ended its work, if there was one."""
        if self._running.failure is not None:
            raise self._running.failure
        return self._running

    def _load(self, thread: ThreadPoolExecutor) -> None:
        self._core = EmbeddedCore(self._config, thread)

    async def _call(self, command: Callable[..., T], *args: object) -> T:
        """Run ``command`` in the thread, between two tokens."""
        if self._thread is None:
            raise RuntimeError("the engine is not running: it has not been started, or was shut down")
        return await asyncio.get_running_loop().run_in_executor(self._thread, command, *args)
