"""What happens inside the embedded engine's thread: requests, pauses, swaps and reports around the decoder.

Invariant: no method is ever called during a step, so whatever one changes holds from the next token on.

    who waits                     for what                        who wakes them
    ---------                     --------                        --------------
    reader of a ``Reply``         an output of its rows           ``work`` (as rows finish), ``abort``, ``fail``
    caller of ``pause("wait")``   accepted requests to finish     ``work``; ``resume``, another ``pause``, ``fail``
    held requests                 ``resume``                      the caller of ``pause``
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Literal
from weakref import WeakValueDictionary

import torch

from skyasync.engines.embedded.decoder import Decoder, Row, cache_budget
from skyasync.engines.embedded.logit_edits import Words, tokenised
from skyasync.engines.embedded.model import EmbeddedModel
from skyasync.engines.embedded.sampling import stream_key
from skyasync.engines.embedded.weight_updates import WeightUpdater
from skyasync.engines.protocol import (
    EngineConfig,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    PauseMode,
    RequestFailedError,
    refusal,
)
from skyasync.engines.stop_strings import StopStrings
from skyasync.errors import UserError, unknown
from skyasync.heap import give_back, keep_freed
from skyasync.weight_sync.transfers.file import write_weights
from skyasync.weight_sync.transfers.received import ReceivedWeights, WeightReader
from skyasync.weight_sync.update import CurrentContent, WeightUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


KEPT_WORDS = 64  # lists of bad words whose tokens are remembered


class Reply:
    """Where the outputs of one call go: an asyncio queue of lists, or of the error that ended the engine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[list[GenerationOutput] | BaseException] = asyncio.Queue()

    def send(self, message: list[GenerationOutput] | BaseException) -> None:
        """Callable from any thread; a loop that has ended no longer listens."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.queue.put_nowait, message)


class EmbeddedCore:
    """All methods run in the engine's thread; only ``stats`` may be read from elsewhere.

    Attributes:
        failure: the error that ended all work, which is the answer to whatever is asked later; None while all is well.

    Args:
        thread: the engine's. Commands wait in its queue, and so does the next step: behind those that came before it.
    """

    def __init__(self, config: EngineConfig, thread: Executor) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)  # holds for the calling thread
        self.failure: BaseException | None = None
        self._config, self._thread = config, thread
        self._step_is_queued = False
        self._model = EmbeddedModel(config)
        if self._model.device.type == "cpu":
            keep_freed()  # after the weights, whose memory goes back when others are adopted
        budget = cache_budget(self._model.device, config.kv_cache_gb, config.gpu_memory_utilization)
        self._decoder = Decoder(
            self._model, version=config.version, max_num_seqs=config.max_num_seqs, cache_bytes=budget
        )
        self._reader = WeightReader(self._model.device)
        self._whole = True  # it holds one version, and nothing of another
        self._has, self._updater = CurrentContent(), WeightUpdater(self._model)
        self._state: Literal["running", "draining", "paused"] = "running"
        self._rows: dict[str, Row] = {}  # every request that has not been answered
        self._held: list[Row] = []  # accepted while not running
        self._drained: list[Future[None]] = []
        self._stop_strings = WeakValueDictionary[tuple[tuple[str, ...], bool], StopStrings]()  # of running requests
        self._tokenised_words: dict[tuple[str, ...], Words] = {}
        self._busy_s = 0.0
        self._paused_s = 0.0
        self._paused_since: float | None = None

    def work(self) -> None:
        """Compute one token for every running request, and come back for the next."""
        self._step_is_queued = False
        if not self._has_work:
            return
        try:
            started = time.perf_counter()
            rows = self._decoder.step()
            self._busy_s += time.perf_counter() - started  # counted before anyone can know of the tokens
            self._report(row for row in rows if row.streamed or row.finish_reason)
            if self._state == "draining" and not self._decoder.busy:
                self._enter("paused")
        except BaseException as error:
            self.fail(error)
        self._go_on()

    @property
    def _has_work(self) -> bool:
        return self.failure is None and self._state != "paused" and self._decoder.busy

    def _go_on(self) -> None:
        """Queue the next step, if there is something to do."""
        if self._has_work and not self._step_is_queued:
            self._step_is_queued = True
            self._thread.submit(self.work)

    def submit(self, requests: Sequence[GenerationRequest], reply: Reply, streamed: bool) -> None:
        """Accept the requests; one that can never be answered is answered with its error."""
        rows: dict[str, Row] = {}
        refused: list[GenerationOutput] = []
        arrays = {id(request.prompt_token_ids): request.prompt_token_ids for request in requests}
        prompts = {key: array.tolist() for key, array in arrays.items()}  # one list for all samples of a prompt
        for request in requests:
            name = request.request_id
            if name in rows or name in self._rows:
                raise UserError(f"request id {name!r} is already that of an unanswered request")
            try:
                _check_request(request, self._config.max_model_len)
                rows[name] = self._row(request, prompts[id(request.prompt_token_ids)], reply, streamed)
            except Exception as error:
                refused.append(refusal(request, error))
        if refused:
            reply.send(refused)
        self._rows.update(rows)
        if self._state == "running":
            self._decoder.waiting.extend(rows.values())
            self._go_on()
        else:
            self._held += rows.values()

    def pause(self, mode: PauseMode) -> Future[None]:
        """The future ends when no token is being computed any more."""
        if mode not in ("keep", "abort", "wait"):
            raise UserError(unknown("pause mode", mode, ["keep", "abort", "wait"]))
        if mode == "abort":
            self.abort(None)
        done: Future[None] = Future()
        self._drained.append(done)
        self._enter("draining" if mode == "wait" and self._decoder.busy and self._state != "paused" else "paused")
        return done

    def resume(self) -> None:
        self._enter("running")
        held, self._held = self._held, []
        self._decoder.waiting.extend(held)
        self._go_on()

    def abort(self, ids: Sequence[str] | None) -> None:
        chosen = None if ids is None else set(ids)
        cut = self._decoder.abort(chosen)
        for row in self._held:
            if chosen is None or row.request.request_id in chosen:
                row.finish_reason = "abort"
                cut.append(row)
        self._held = [row for row in self._held if row.finish_reason is None]
        self._report(cut)

    def progress(self) -> list[GenerationOutput]:
        """News of the requests whose owners get one answer; those of the others go to them anyway."""
        return [row.news() for row in self._rows.values() if row.has_news and not row.streamed]

    def read(self, update: WeightUpdate) -> ReceivedWeights:
        """Not in the engine's thread, which goes on answering; one at a time."""
        known = ["shared_memory"]  # and the broadcast, if it was configured for it
        if update.backend not in (*known, self._config.weight_sync_backend):
            raise UserError(unknown("weight sync backend of the transformers engine", update.backend, known))
        return self._reader.read(update.info)

    def update_weights(self, update: WeightUpdate, received: ReceivedWeights) -> None:
        self._has.begin(update)
        self._whole = False
        self._updater.apply(received)
        self._has.complete(update)
        self._decoder.version = update.version
        self._whole = True

    def held_version(self) -> int:
        """-1 where an update did not end well."""
        return self._decoder.version if self._whole else -1

    def hand_back(self, folder: str) -> str:
        """What it computes with, as a file that whoever reads it removes; its path."""
        held = self._model.tensors()
        return write_weights({name: held[name] for name in self._model.own_names()}, folder)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._model.score(sequences)

    def sleep(self) -> None:
        if self._rows:
            raise UserError(f"sleep needs an idle engine; {len(self._rows)} requests are unanswered")
        self._decoder.free_cache()
        give_back()

    def stats(self) -> EngineStats:
        since = self._paused_since
        return EngineStats(
            running=self._decoder.running,
            waiting=len(self._decoder.waiting) + len(self._held),
            generated_tokens=self._decoder.generated_tokens,
            busy_s=self._busy_s,
            paused_s=self._paused_s + (time.perf_counter() - since if since is not None else 0.0),
        )

    def fail(self, error: BaseException) -> None:
        """End all work, and answer everyone who waits with ``error``."""
        self.failure = error
        for reply in {id(row.owner): row.owner for row in self._rows.values()}.values():
            reply.send(error)
        self._rows.clear()
        drained, self._drained = self._drained, []
        for future in drained:
            future.set_exception(error)

    def _row(self, request: GenerationRequest, prompt: list[int], reply: Reply, streamed: bool) -> Row:
        sampling = request.sampling
        if min(prompt) < 0 or max(prompt) >= self._model.vocabulary:
            raise RequestFailedError(
                f"its prompt has tokens from {min(prompt)} to {max(prompt)}, the model's vocabulary has "
                f"{self._model.vocabulary}"
            )
        self._refuse_unknown_tokens(request)
        stop_ids = frozenset(sampling.stop_token_ids)
        return Row(
            request,
            prompt,
            key=stream_key(sampling.seed, self._config.seed, request.request_id),
            limit=min(sampling.max_tokens, self._config.max_model_len - len(prompt)),
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | self._model.eos_ids,
            stop_strings=self._stops(request) if sampling.stop else None,
            bad_words=self._bad_words(request) if sampling.bad_words else (),
            streamed=streamed,
            owner=reply,
        )

    def _stops(self, request: GenerationRequest) -> StopStrings:
        tokenizer = self._tokenizer_for("stop strings", request)
        key = (request.sampling.stop, request.sampling.skip_special_tokens)
        found = self._stop_strings.get(key)
        if found is None:
            found = self._stop_strings[key] = StopStrings(tokenizer, key[0], skip_special_tokens=key[1])
        return found

    def _bad_words(self, request: GenerationRequest) -> Words:
        tokenizer, words = self._tokenizer_for("bad words", request), request.sampling.bad_words
        if words not in self._tokenised_words:
            if len(self._tokenised_words) >= KEPT_WORDS:
                self._tokenised_words.clear()
            self._tokenised_words[words] = tokenised(
                words, lambda text: tokenizer.encode(text, add_special_tokens=False)
            )
        return self._tokenised_words[words]

    def _tokenizer_for(self, what: str, request: GenerationRequest) -> PreTrainedTokenizerBase:
        if self._model.tokenizer is None:
            raise RequestFailedError(f"it has {what}, but {self._config.model_path} has no tokenizer")
        return self._model.tokenizer

    def _refuse_unknown_tokens(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        named = {
            "logit_bias": sampling.logit_bias,
            "allowed_token_ids": sampling.allowed_token_ids,
            "stop_token_ids": sampling.stop_token_ids,
        }
        for name, tokens in named.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._model.vocabulary:
                raise RequestFailedError(
                    f"{name} has tokens from {min(tokens)} to {max(tokens)}, the model's vocabulary has "
                    f"{self._model.vocabulary}"
                )

    def _report(self, rows: Iterable[Row]) -> None:
        """Send the rows' outputs to their owners, one message each."""
        messages: dict[int, tuple[Reply, list[GenerationOutput]]] = {}
        for row in rows:
            output = row.news() if row.streamed else row.output()
            messages.setdefault(id(row.owner), (row.owner, []))[1].append(output)
            if row.finish_reason:
                del self._rows[row.request.request_id]
        for reply, outputs in messages.values():
            reply.send(outputs)

    def _enter(self, state: Literal["running", "draining", "paused"]) -> None:
        """Change the state, keep the clock of pauses, and release those who waited for the end of a drain."""
        now = time.perf_counter()
        if self._paused_since is not None:
            self._paused_s += now - self._paused_since
        self._paused_since = now if state == "paused" else None
        self._state = state
        if state != "draining":
            drained, self._drained = self._drained, []
            for future in drained:
                future.set_result(None)


def _check_request(request: GenerationRequest, max_model_len: int) -> None:
    """Raises ``RequestFailedError`` if this engine could never answer it."""
    sampling, length = request.sampling, len(request.prompt_token_ids)
    if length == 0:
        raise RequestFailedError("its prompt is empty")
    if length >= max_model_len:
        room = f"which leaves no room for a response: max_model_len is {max_model_len}"
        raise RequestFailedError(f"its prompt has {length} tokens, {room}")
    if sampling.structured_outputs or sampling.repetition_detection:
        raise RequestFailedError("structured_outputs and repetition_detection need generator.backend=vllm")
