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
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from transformers import PreTrainedTokenizerBase

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
    SamplingParams,
    Stopwatch,
    refusal,
)
from skyasync.inference.stop_strings import StopStrings
from skyasync.weight_sync.delta import ReceivedWeights
from skyasync.weight_sync.transfers.endpoints import WeightReader
from skyasync.weight_sync.update import CurrentContent, WakePart, WeightUpdate

P = ParamSpec("P")
T = TypeVar("T")

# Lists of bad words whose tokens are remembered: most runs have one, an agent's program may send
# another one with every request.
REMEMBERED_WORDS = 64


def in_thread(
    method: Callable[Concatenate[TransformersEngine, P], T],
) -> Callable[Concatenate[TransformersEngine, P], Coroutine[Any, Any, T]]:
    """Run the method in the engine's thread, between two tokens.

    Raises the error that ended the engine's work, if there was one.
    """

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
    """The outputs of one call: a queue of lists, or of the error that ended the engine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[list[GenerationOutput] | BaseException] = asyncio.Queue()

    def send(self, message: list[GenerationOutput] | BaseException) -> None:
        """Send a message from any thread; without effect if the loop has ended."""
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
        # The error that ended all work, and that all later calls raise.
        self._failure: BaseException | None = None
        self._step_is_queued = False
        self._content = CurrentContent()
        self._state: Literal["running", "draining", "paused"] = "running"
        self._rows: dict[str, DecodingRow] = {}  # all unanswered requests, by id
        self._paused_rows: list[DecodingRow] = []  # accepted while not running
        self._drain_waiters: list[Future[None]] = []  # calls of ``pause`` that wait for a drain
        # Requests with equal stop strings share an object, which remembers texts of tokens.
        self._stop_strings = WeakValueDictionary[tuple[tuple[str, ...], bool], StopStrings]()
        self._tokenised_words: dict[tuple[str, ...], Words] = {}
        self._busy_s = 0.0
        self._paused_time = Stopwatch()

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
        if self._model.device.type == "cuda":  # the rest of the allowed share, without the weights
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._model.device)
            reserved_bytes = (1 - config.gpu_memory_utilization) * total_bytes
            # At least 256 MB: the cache of a short request alone.
            cache_bytes = max(int(free_bytes - reserved_bytes), 2**28)
        self._decoder = Decoder(
            self._model,
            version=config.version,
            max_num_seqs=config.max_num_seqs,
            cache_bytes=cache_bytes,
        )
        self._reader = WeightReader(self._model.device)
        self._updater = WeightUpdater(self._model)

    async def shutdown(self) -> None:
        """End the thread; requests that still wait for an answer get an error."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            error = RuntimeError("the engine was shut down before the request was answered")
            await asyncio.get_running_loop().run_in_executor(thread, self._fail, error)
            await asyncio.to_thread(thread.shutdown)
            for name in ("_model", "_decoder", "_reader", "_updater"):  # free their memory
                vars(self).pop(name, None)

    def _fail(self, error: BaseException) -> None:
        """End all work, and answer all calls that wait with ``error``."""
        self._failure = error
        for reply in dict.fromkeys(row.owner for row in self._rows.values()):  # one per call
            reply.send(error)
        self._rows.clear()
        waiters = self._drain_waiters
        self._drain_waiters = []
        for future in waiters:
            future.set_exception(error)

    # -- the loop
    # -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Compute a token for each running request, and queue the next step after the commands."""
        self._step_is_queued = False
        if not self._has_work:
            return
        try:
            start_s = time.perf_counter()
            rows = self._decoder.step()
            # Before the report: a caller that has its tokens finds their time in the statistics.
            self._busy_s += time.perf_counter() - start_s
            self._report(row for row in rows if row.finish_reason)
            if self._state == "draining" and not self._decoder.busy:
                self._enter("paused")
        except BaseException as error:  # the thread's pool would drop it, and callers would wait
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
        messages: defaultdict[Reply, list[GenerationOutput]] = defaultdict(list)
        for row in rows:
            messages[row.owner].append(row.output())
            del self._rows[row.request.request_id]
        for reply, outputs in messages.items():
            reply.send(outputs)

    def _enter(self, state: Literal["running", "draining", "paused"]) -> None:
        """Change the state, and end the calls that waited for the end of a drain."""
        self._state = state
        self._paused_time.switch(state == "paused")
        if state != "draining":
            waiters = self._drain_waiters
            self._drain_waiters = []
            for future in waiters:
                future.set_result(None)

    # -- requests
    # -----------------------------------------------------------------------------------------

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
    ) -> AsyncGenerator[list[GenerationOutput], None]:
        """Leaving the iteration early aborts what is unanswered.

        Raises:
            UserError: if two have one id; none of ``requests`` is started then.
        """
        reply = Reply()
        unanswered_ids = {request.request_id for request in requests}
        await self._submit(requests, reply)
        try:
            while unanswered_ids:
                message = await reply.queue.get()
                if isinstance(message, BaseException):
                    unanswered_ids.clear()
                    raise message
                unanswered_ids -= {output.request_id for output in message}
                yield message
        finally:
            if unanswered_ids and self._thread is not None:
                self._thread.submit(self._abort, list(unanswered_ids))

    @in_thread
    def _submit(self, requests: Sequence[GenerationRequest], reply: Reply) -> None:
        """Accept the requests; one that can never be answered is answered with its error."""
        rows: dict[str, DecodingRow] = {}
        refusals: list[GenerationOutput] = []
        prompts: dict[int, list[int]] = {}  # samples of a prompt share one list
        for request in requests:
            name = request.request_id
            if name in rows or name in self._rows:
                raise UserError(f"request id {name!r} is already that of an unanswered request")
            array = request.prompt_token_ids
            if id(array) not in prompts:
                prompts[id(array)] = array.tolist()
            try:
                rows[name] = self._row(request, prompts[id(array)], reply)
            except Exception as error:
                refusals.append(refusal(request, error))
        if refusals:
            reply.send(refusals)
        self._rows.update(rows)
        if self._state == "running":
            continued_rows = []
            for row in rows.values():
                if row.request.continues:
                    continued_rows.append(row)
                else:
                    self._decoder.waiting.append(row)
            # In front, in order: ``extendleft`` adds one after the other.
            self._decoder.waiting.extendleft(reversed(continued_rows))
            self._queue_step()
        else:
            self._paused_rows += rows.values()

    def _row(self, request: GenerationRequest, prompt: list[int], reply: Reply) -> DecodingRow:
        """The decoder's row of a request.

        Raises:
            RequestFailedError: if this engine could never answer the request.
        """
        sampling = request.sampling
        longest = self.config.max_model_len
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
            if not tokens:
                continue
            smallest = min(tokens)
            largest = max(tokens)
            if smallest < 0 or largest >= self._model.vocabulary:
                raise RequestFailedError(
                    f"{name} has tokens from {smallest} to {largest}, the model's vocabulary has "
                    f"{self._model.vocabulary}"
                )
        stop_strings = self._stop_strings_of(sampling)
        bad_words = self._bad_words_of(sampling)
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= self._model.eos_ids
        name = request.request_id
        return DecodingRow(
            request,
            prompt,
            key=stream_key(sampling.seed, self.config.seed, name, request.response_tokens),
            limit=min(sampling.max_tokens, longest - len(prompt)),
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            bad_words=bad_words,
            owner=reply,
        )

    def _stop_strings_of(self, sampling: SamplingParams) -> StopStrings | None:
        """The stop strings of a request, shared with others that have the same."""
        if not sampling.stop:
            return None
        key = (sampling.stop, sampling.skip_special_tokens)
        stop_strings = self._stop_strings.get(key)
        if stop_strings is None:
            tokenizer = self._tokenizer("stop strings")
            stop_strings = StopStrings(tokenizer, sampling.stop, sampling.skip_special_tokens)
            self._stop_strings[key] = stop_strings
        return stop_strings

    def _bad_words_of(self, sampling: SamplingParams) -> Words:
        """The bad words of a request, as tokens."""
        words = sampling.bad_words
        if not words:
            return ()
        if words not in self._tokenised_words:
            tokenizer = self._tokenizer("bad words")
            encode = partial(tokenizer.encode, add_special_tokens=False)
            if len(self._tokenised_words) >= REMEMBERED_WORDS:
                self._tokenised_words.clear()
            self._tokenised_words[words] = tokenised(words, encode)
        return self._tokenised_words[words]

    def _tokenizer(self, feature: str) -> PreTrainedTokenizerBase:
        """The model's tokenizer, for a feature of a request that needs it."""
        if self._model.tokenizer is None:
            raise RequestFailedError(
                f"it has {feature}, but {self.config.model_path} has no tokenizer"
            )
        return self._model.tokenizer

    @in_thread
    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._abort(request_ids)

    def _abort(self, ids: Sequence[str] | None) -> None:
        """End these requests (None: all) in the engine's thread, and report their tokens so far."""
        chosen_ids = None if ids is None else set(ids)
        aborted_rows = self._decoder.abort(chosen_ids)
        remaining_rows = []
        for row in self._paused_rows:
            if chosen_ids is None or row.request.request_id in chosen_ids:
                row.finish_reason = "abort"
                aborted_rows.append(row)
            else:
                remaining_rows.append(row)
        self._paused_rows = remaining_rows
        self._report(aborted_rows)

    @in_thread
    def heartbeat(self) -> None:
        """Returns as soon as the thread has time for commands, which proves that it works."""

    @in_thread
    def progress(self) -> list[GenerationOutput]:
        outputs = []
        for row in self._rows.values():
            if len(row.token_ids) > row.reported:
                outputs.append(row.progress())
        return outputs

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
        """Pause; a drain ("wait") ends early at ``resume`` or another pause."""
        # The thread returns a future and does not wait for it: it has to compute the drain.
        await asyncio.wrap_future(await self._pause(mode))

    @in_thread
    def _pause(self, mode: PauseMode) -> Future[None]:
        """The future ends when no token is being computed any more."""
        if mode not in ("keep", "abort", "wait"):
            raise UserError(unknown("pause mode", mode, ["keep", "abort", "wait"]))
        if mode == "abort":
            self._abort(None)
        waiter: Future[None] = Future()
        self._drain_waiters.append(waiter)
        if mode == "wait" and self._decoder.busy and self._state != "paused":
            self._enter("draining")
        else:
            self._enter("paused")
        return waiter

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
        # Not in the engine's thread, which computes tokens meanwhile.
        weights = await asyncio.to_thread(reader.read, update.info)
        await self._apply(update, weights)

    @in_thread
    def _reader_of(self, update: WeightUpdate) -> WeightReader:
        """The reader of an update, which the thread has made with the model."""
        backends = ("shared_memory", self.config.weight_sync_backend)  # the latter: a broadcast
        if update.backend not in backends:
            subject = "weight sync backend of the transformers engine"
            raise UserError(unknown(subject, update.backend, backends[:1]))
        return self._reader

    @in_thread
    def _apply(self, update: WeightUpdate, weights: ReceivedWeights) -> None:
        self._content.begin(update)
        self._updater.apply(weights)
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
        """Does nothing: the next request allocates the cache."""

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
            paused_s=self._paused_time.seconds,
        )
