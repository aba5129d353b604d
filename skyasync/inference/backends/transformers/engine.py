"""The embedded engine: transformers' models under a decode loop of ours, in one thread.

Invariant: the model, the decoder and every request belong to the engine's thread. The event loop
only posts commands (``in_thread``), which run between two tokens: a change holds from the next
token on, and a weight update, a pause or an abort needs no lock. Every request is answered once:
with its output, or with the error that ended the engine.

Why not one of the library's own cores: here a prompt is computed once for all its samples, finished
rows leave the batch, new requests join between two tokens, and the cache is not copied at every
token. On one core, 0.45 M parameters, tokens per CPU second
(``python -m benchmarks.embedded_engine``):

    core                              64 requests    1024 requests    1024 in groups of 16
    ``generate`` with hooks                 5,500            5,200                   5,200
    continuous batching manager               510              570                     580
    this engine                             6,400           10,900                  19,300

| who waits                   | for what                      | woken by                                       |
|-----------------------------|-------------------------------|------------------------------------------------|
| reader of a ``Reply``       | an output of its rows         | ``_work`` as rows finish, ``abort``, a failure |
| caller of ``pause("wait")`` | accepted requests to finish   | ``_work``, ``resume``, ``pause``, a failure    |
| ``_paused_rows``            | ``resume``                    | the caller of ``pause``                        |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch

from skyasync.errors import UserError, unknown
from skyasync.heap import give_back, keep_freed
from skyasync.inference.backends.transformers.decoder import Decoder, DecodingRow
from skyasync.inference.backends.transformers.model import EmbeddedModel, WeightUpdater
from skyasync.inference.backends.transformers.sampling import Words, stream_key, tokenised
from skyasync.inference.interface import (
    EngineConfig,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
    RequestFailedError,
    Stopwatch,
    refusal,
)
from skyasync.inference.stop_strings import StopStrings
from skyasync.weight_sync.delta import ReceivedWeights
from skyasync.weight_sync.transfers.endpoints import WeightReader
from skyasync.weight_sync.update import CurrentContent, WakePart, WeightUpdate

P = ParamSpec("P")
T = TypeVar("T")

REMEMBERED_WORDS = 64  # lists of bad words whose tokens are remembered


def in_thread(
    method: Callable[Concatenate[TransformersEngine, P], T],
) -> Callable[Concatenate[TransformersEngine, P], Coroutine[Any, Any, T]]:
    """The method runs in the engine's thread, between two tokens. Raises the error that ended the
    engine's work."""

    def command(engine: TransformersEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if engine._failure is not None:
            raise engine._failure
        return method(engine, *args, **kwargs)

    @wraps(method)
    async def call(engine: TransformersEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if engine._thread is None:
            raise RuntimeError(
                "the engine is not running: it has not been started, or was shut down"
            )
        return await asyncio.wrap_future(engine._thread.submit(command, engine, *args, **kwargs))

    return call


class Reply:
    """Where the outputs of one call go: an asyncio queue of lists, or of the error that ended the
    engine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[list[GenerationOutput] | BaseException] = asyncio.Queue()

    def send(self, message: list[GenerationOutput] | BaseException) -> None:
        """From any thread; without effect if the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.queue.put_nowait, message)


class TransformersEngine(InferenceEngine):
    """An engine in this process, on one GPU or on CPU threads.

    A response ends with ``finish_reason="length"`` at ``max_tokens`` or when prompt and response
    together have ``max_model_len`` tokens, whichever comes first. A batch computes attention over
    its longest sequence: sequences of very different lengths are better served by vLLM.
    """

    _model: EmbeddedModel  # this and the decoder are made by ``_load``
    _decoder: Decoder

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._thread: ThreadPoolExecutor | None = None  # of one: commands and steps, one at a time
        self._failure: BaseException | None = (
            None  # ended all work, and is the answer to all later calls
        )
        self._step_is_queued = False
        self._content = CurrentContent()
        self._state: Literal["running", "draining", "paused"] = "running"
        self._rows: dict[str, DecodingRow] = {}  # every request that has not been answered
        self._paused_rows: list[DecodingRow] = []  # accepted while not running
        self._drained: list[Future[None]] = []
        self._stop_strings = WeakValueDictionary[
            tuple[tuple[str, ...], bool], StopStrings
        ]()  # of running requests
        self._tokenised_words: dict[tuple[str, ...], Words] = {}
        self._busy_s = 0.0
        self._paused = Stopwatch()

    # -- lifecycle
    # ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._thread = ThreadPoolExecutor(1, "transformers engine")
        await self._load()

    @in_thread
    def _load(self) -> None:
        config = self.config
        if config.threads:
            torch.set_num_threads(config.threads)  # holds for the calling thread
        self._model = EmbeddedModel(config)
        if self._model.device.type == "cpu":
            keep_freed()  # after the weights, whose memory is given back when they are mapped
        cache_bytes = int(config.kv_cache_gb * 2**30)
        if self._model.device.type == "cuda":  # what the weights leave of the allowed share
            free, total = torch.cuda.mem_get_info(self._model.device)
            cache_bytes = max(int(free - (1 - config.gpu_memory_utilization) * total), 2**28)
        self._decoder = Decoder(
            self._model,
            version=config.version,
            max_num_seqs=config.max_num_seqs,
            cache_bytes=cache_bytes,
        )
        self._reader, self._updater = WeightReader(self._model.device), WeightUpdater(self._model)

    async def shutdown(self) -> None:
        """End the thread; requests that still wait for an answer get an error."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            ended = RuntimeError("the engine was shut down before the request was answered")
            await asyncio.get_running_loop().run_in_executor(thread, self._fail, ended)
            await asyncio.to_thread(thread.shutdown)
            for name in ("_model", "_decoder", "_reader", "_updater"):  # free their memory
                vars(self).pop(name, None)

    def _fail(self, error: BaseException) -> None:
        """End all work, and answer all calls that wait with ``error``."""
        self._failure = error
        for reply in {id(row.owner): row.owner for row in self._rows.values()}.values():
            reply.send(error)
        self._rows.clear()
        drained = self._drained
        self._drained = []
        for future in drained:
            future.set_exception(error)

    # -- the loop
    # -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Compute one token for every running request, and queue the next step after the commands
        that wait."""
        self._step_is_queued = False
        if not self._has_work:
            return
        try:
            started = time.perf_counter()
            rows = self._decoder.step()
            self._busy_s += (
                time.perf_counter() - started
            )  # counted before the tokens are known outside
            self._report(row for row in rows if row.finish_reason)
            if self._state == "draining" and not self._decoder.busy:
                self._enter("paused")
        except BaseException as error:
            self._fail(error)
        self._queue_step()

    @property
    def _has_work(self) -> bool:
        return self._failure is None and self._state != "paused" and self._decoder.busy

    def _queue_step(self) -> None:
        thread = self._thread
        if self._has_work and not self._step_is_queued and thread is not None:
            self._step_is_queued = True
            thread.submit(self._work)

    def _report(self, rows: Iterable[DecodingRow]) -> None:
        """Send the rows' outputs to their owners, one message each."""
        messages: dict[int, tuple[Reply, list[GenerationOutput]]] = {}
        for row in rows:
            messages.setdefault(id(row.owner), (row.owner, []))[1].append(row.output())
            del self._rows[row.request.request_id]
        for reply, outputs in messages.values():
            reply.send(outputs)

    def _enter(self, state: Literal["running", "draining", "paused"]) -> None:
        """Change the state, and end the calls that waited for the end of a drain."""
        self._state = state
        self._paused.switch(state == "paused")
        if state != "draining":
            drained = self._drained
            self._drained = []
            for future in drained:
                future.set_result(None)

    # -- requests
    # -----------------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[list[GenerationOutput], None]:
        """Leaving the iteration early aborts what is unanswered.

        Raises:
            UserError: if two have one id; none of ``requests`` is started then.
        """
        reply = Reply()
        unanswered = {request.request_id for request in requests}
        await self._submit(requests, reply)
        try:
            while unanswered:
                message = await reply.queue.get()
                if isinstance(message, BaseException):
                    unanswered.clear()
                    raise message
                unanswered -= {output.request_id for output in message}
                yield message
        finally:
            if unanswered and self._thread is not None:
                self._thread.submit(self._abort, list(unanswered))

    @in_thread
    def _submit(self, requests: Sequence[GenerationRequest], reply: Reply) -> None:
        """Accept the requests; one that can never be answered is answered with its error."""
        rows: dict[str, DecodingRow] = {}
        refused: list[GenerationOutput] = []
        arrays = {id(request.prompt_token_ids): request.prompt_token_ids for request in requests}
        prompts = {
            key: array.tolist() for key, array in arrays.items()
        }  # one list for all samples of a prompt
        for request in requests:
            name = request.request_id
            if name in rows or name in self._rows:
                raise UserError(f"request id {name!r} is already that of an unanswered request")
            try:
                rows[name] = self._row(request, prompts[id(request.prompt_token_ids)], reply)
            except Exception as error:
                refused.append(refusal(request, error))
        if refused:
            reply.send(refused)
        self._rows.update(rows)
        if self._state == "running":
            waiting = self._decoder.waiting
            waiting.extendleft(reversed([row for row in rows.values() if row.request.continues]))
            waiting.extend(row for row in rows.values() if not row.request.continues)
            self._queue_step()
        else:
            self._paused_rows += rows.values()

    def _row(self, request: GenerationRequest, prompt: list[int], reply: Reply) -> DecodingRow:
        """Raises ``RequestFailedError`` if this engine could never answer the request."""
        sampling = request.sampling
        longest = self.config.max_model_len
        tokenizer = self._model.tokenizer
        if not prompt:
            raise RequestFailedError("its prompt is empty")
        if len(prompt) >= longest:
            raise RequestFailedError(
                f"its prompt has {len(prompt)} tokens, which leaves no room for a response: max_model_len is {longest}"
            )
        try:
            self._model.check_images(prompt, request.images)
        except UserError as error:
            raise RequestFailedError(str(error)) from error
        if sampling.structured_outputs or sampling.repetition_detection:
            raise RequestFailedError(
                "structured_outputs and repetition_detection need generator.backend=vllm"
            )
        tokens_of: dict[str, Collection[int]] = {
            "its prompt": prompt,
            "logit_bias": sampling.logit_bias,
            "allowed_token_ids": sampling.allowed_token_ids,
            "stop_token_ids": sampling.stop_token_ids,
        }
        for name, tokens in tokens_of.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._model.vocabulary:
                raise RequestFailedError(
                    f"{name} has tokens from {min(tokens)} to {max(tokens)}, the model's vocabulary has "
                    f"{self._model.vocabulary}"
                )
        bad_words: Words = ()
        stop_strings = None
        if sampling.stop:
            if tokenizer is None:
                raise RequestFailedError(
                    f"it has stop strings, but {self.config.model_path} has no tokenizer"
                )
            key = (sampling.stop, sampling.skip_special_tokens)
            stop_strings = self._stop_strings.get(key)
            if stop_strings is None:
                stop_strings = self._stop_strings[key] = StopStrings(
                    tokenizer, key[0], skip_special_tokens=key[1]
                )
        if sampling.bad_words:
            if tokenizer is None:
                raise RequestFailedError(
                    f"it has bad words, but {self.config.model_path} has no tokenizer"
                )
            if sampling.bad_words not in self._tokenised_words:
                if len(self._tokenised_words) >= REMEMBERED_WORDS:
                    self._tokenised_words.clear()
                encode = partial(tokenizer.encode, add_special_tokens=False)
                self._tokenised_words[sampling.bad_words] = tokenised(sampling.bad_words, encode)
            bad_words = self._tokenised_words[sampling.bad_words]
        stop_ids = frozenset(sampling.stop_token_ids)
        return DecodingRow(
            request,
            prompt,
            key=stream_key(sampling.seed, self.config.seed, request.request_id, request.drawn),
            limit=min(sampling.max_tokens, longest - len(prompt)),
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self._model.eos_ids,
            stop_strings=stop_strings,
            bad_words=bad_words,
            owner=reply,
        )

    @in_thread
    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._abort(request_ids)

    def _abort(self, ids: Sequence[str] | None) -> None:
        chosen = None if ids is None else set(ids)
        cut = self._decoder.abort(chosen)
        for row in self._paused_rows:
            if chosen is None or row.request.request_id in chosen:
                row.finish_reason = "abort"
                cut.append(row)
        self._paused_rows = [row for row in self._paused_rows if row.finish_reason is None]
        self._report(cut)

    @in_thread
    def heartbeat(self) -> None:
        """The thread has come to this call."""

    @in_thread
    def progress(self) -> list[GenerationOutput]:
        return [row.progress() for row in self._rows.values() if len(row.token_ids) > row.reported]

    @in_thread
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        for sequence in sequences:
            if len(sequence) > self.config.max_model_len:
                raise UserError(
                    f"a sequence to be scored has {len(sequence)} tokens; max_model_len is {self.config.max_model_len}"
                )
        return self._model.score(sequences)

    # -- control
    # ------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        """A drain ("wait") that ``resume`` or another pause overtakes ends early."""
        await asyncio.wrap_future(await self._pause(mode))

    @in_thread
    def _pause(self, mode: PauseMode) -> Future[None]:
        """The future ends when no token is being computed any more."""
        if mode not in ("keep", "abort", "wait"):
            raise UserError(unknown("pause mode", mode, ["keep", "abort", "wait"]))
        if mode == "abort":
            self._abort(None)
        done: Future[None] = Future()
        self._drained.append(done)
        self._enter(
            "draining"
            if mode == "wait" and self._decoder.busy and self._state != "paused"
            else "paused"
        )
        return done

    @in_thread
    def resume(self) -> None:
        self._enter("running")
        rows = self._paused_rows
        self._paused_rows = []
        self._decoder.waiting.extend(rows)
        self._queue_step()

    async def update_weights(self, update: WeightUpdate) -> None:
        """Needs no pause: the update happens between two tokens, and the cache is kept."""
        reader = await self._reader_of(update)
        received = await asyncio.to_thread(
            reader.read, update.info
        )  # the engine computes meanwhile
        await self._apply(update, received)

    @in_thread
    def _reader_of(self, update: WeightUpdate) -> WeightReader:
        known = ["shared_memory"]  # and the broadcast, if it was configured for it
        if update.backend not in (*known, self.config.weight_sync_backend):
            raise UserError(
                unknown("weight sync backend of the transformers engine", update.backend, known)
            )
        return self._reader

    @in_thread
    def _apply(self, update: WeightUpdate, received: ReceivedWeights) -> None:
        self._content.begin(update)
        self._updater.apply(received)
        self._content.complete(update)
        self._decoder.version = update.version
        self._queue_step()  # requests may have waited for this version

    @in_thread
    def sleep(self) -> None:
        if self._rows:
            raise UserError(
                f"sleep needs an idle engine; {len(self._rows)} requests are unanswered"
            )
        self._decoder.cache = None
        give_back()

    @in_thread
    def wake(self, part: WakePart) -> None:
        """Nothing to undo: the next request allocates its cache."""

    async def stats(self) -> EngineStats:
        if self._thread is None:
            raise RuntimeError(
                "the engine is not running: it has not been started, or was shut down"
            )
        return EngineStats(
            running=self._decoder.running,
            waiting=len(self._decoder.waiting) + len(self._paused_rows),
            generated_tokens=self._decoder.generated_tokens,
            busy_s=self._busy_s,
            paused_s=self._paused.seconds,
        )
