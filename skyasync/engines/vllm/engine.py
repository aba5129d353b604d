"""vLLM behind the engine protocol: ``AsyncLLM`` in this process, its core in a child process.

Invariant: a token's version is the one that vLLM's core sent along with it. The core changes its version
only while it is paused, between two steps, so a stamp cannot be off by a token.

What is cached under which weights: a request that has begun keeps its cache over a weight update (its later
tokens read keys and values of the former weights; that is what "keep" means). Nothing else does: a request
that has no token yet is started over, and the prefix cache is salted with the version, so that no prompt
finds the blocks of an older one.

| who waits                | for what                      | woken by                                        |
|--------------------------|-------------------------------|-------------------------------------------------|
| ``generate``, ``stream`` | outputs of the core           | the core; its death (vLLM's monitor raises)     |
| ``score``                | the same, and for ``resume``  | the same                                        |
| control calls            | the core's answer, each other | the core; its death (looked for every half second) |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skyasync.arrays import Ints, floats, ints
from skyasync.engines.protocol import (
    ENGINES,
    EngineConfig,
    EngineDiedError,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    PauseMode,
    RequestFailedError,
    refusal,
)
from skyasync.engines.stopwatch import Stopwatch
from skyasync.engines.vllm.core import VLLMCore, versions_of
from skyasync.engines.vllm.setup import alike, sampling_parameters, scoring_parameters
from skyasync.errors import UserError
from skyasync.together import not_halfway
from skyasync.weight_sync.delta import Encoded
from skyasync.weight_sync.tensors import as_message
from skyasync.weight_sync.transfers.cuda_ipc import own_part
from skyasync.weight_sync.transfers.file import read_about, remove_weights, write_encoded
from skyasync.weight_sync.transfers.received import WeightReader
from skyasync.weight_sync.update import (
    CUDA_IPC,
    CurrentContent,
    TransferInterruptedError,
    WakePart,
    WeightUpdate,
    is_whole,
)

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput


VLLM_TAGS: dict[WakePart, str] = {"weights": "weights", "cache": "kv_cache"}


@ENGINES.register(
    "vllm",
    tensor_parallel=True,
    weight_sync=("shared_memory", "nccl", "cuda_ipc"),
    reads_mapped_weights=True,
    loads_as_files=True,
    takes_changes=True,
    takes_adapters=("layers",),
    adaptable="skyasync.engines.vllm.adaptable:why_not",
    forgets_asleep=True,
    sleeps_on=("gpu",),
    sampling=("structured_outputs", "repetition_detection"),
    options="skyasync.engines.vllm.options:complaints",
    extra="vllm",
)
class VLLMEngine:
    """See ``InferenceEngine`` for the methods. After its death they raise ``vllm_core.EngineDiedError``.

    ``config.extra``: ``cpu_bind`` (cores for the threads, CPU), ``sleep_mode`` (allow ``sleep``, GPU),
    ``engine_index`` (place among the engines: each draws from random numbers of its own, and has a place in the
    weight syncs by nccl and cuda_ipc), ``one_per_prompt`` (requests of one call that differ in their id alone are one
    request for vLLM, of which it draws n samples).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._core = VLLMCore(config)
        self._in_flight: dict[str, set[str]] = {}  # request as vLLM knows it -> those of ours that want its samples
        self._restarting: set[str] = set()
        self._scores = 0
        self._finished_tokens = 0
        self._told: dict[str, int] = {}  # tokens of unanswered requests that ``progress`` has given
        self._busy, self._paused = Stopwatch(), Stopwatch()
        self._control = asyncio.Lock()
        self._held = CurrentContent()
        self._reader: WeightReader | None = None  # of adapters by broadcast
        self._unproven: list[str] | None = None  # weights that nobody could compare yet; None before the first
        self._asleep = False  # as a whole or in part: nothing is scheduled

    async def start(self) -> None:
        await self._core.start()

    async def shutdown(self) -> None:
        await self._core.shutdown()

    # -- requests -----------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[GenerationOutput]]:
        finished: list[GenerationOutput | EngineDiedError] = []
        arrived = asyncio.Event()

        async def answer(bundle: list[GenerationRequest]) -> None:
            try:
                finished.extend(await self._answer(bundle))
            except EngineDiedError as error:
                finished.append(error)
            except Exception as error:
                why = error.__cause__ if isinstance(error.__cause__, Exception) else error  # vLLM wraps what it raises
                finished.extend(refusal(request, why) for request in bundle)
            arrived.set()

        bundles = alike(requests) if self.config.extra.get("one_per_prompt") else [[r] for r in requests]
        tasks = [asyncio.create_task(answer(bundle)) for bundle in bundles]
        unanswered = len(requests)
        try:
            while unanswered:
                await arrived.wait()
                arrived.clear()
                batch, finished[:] = list(finished), []
                unanswered -= len(batch)
                yield [_or_raise(output) for output in batch]
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, bundle: list[GenerationRequest]) -> list[GenerationOutput]:
        """One output for each of the requests, which are alike."""
        wanted = {request.request_id for request in bundle}
        (output,) = [found async for found in self._outputs(bundle[0], wanted, streaming=False)]
        answers = []
        for request, completion in zip(bundle, output.outputs, strict=True):
            answer = _answered(request, completion, versions_of(completion))
            answers.append(answer if request.request_id in wanted else replace(answer, finish_reason="abort"))
        return answers

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """Yield what is new since the last yield; only the last one has a ``finish_reason``. No client calls it."""
        sent = 0
        async for output in self._outputs(request, {request.request_id}, streaming=True):
            versions = self._core.versions(request.request_id, output)
            yield _answered(request, output.outputs[0], versions[sent:])
            sent = len(versions)

    async def _outputs(
        self, request: GenerationRequest, wanted: set[str], *, streaming: bool
    ) -> AsyncIterator[RequestOutput]:
        """vLLM's outputs, with a sample for each of ``wanted``; what a weight update found without a token is started
        over. ``abort`` takes names out of ``wanted``, and ends the request when none is left."""
        parameters = sampling_parameters(request.sampling, streaming=streaming, samples=len(wanted))
        name, prompt = request.request_id, request.prompt_token_ids.tolist()
        self._in_flight[name] = wanted
        self._watch()
        try:
            finished = False
            while not finished:
                async for output in self._core.outputs(name, prompt, parameters):
                    finished = output.finished and name not in self._restarting
                    if finished:
                        self._finished_tokens += sum(len(versions_of(completion)) for completion in output.outputs)
                    if finished or not output.finished:
                        yield output
                self._restarting.discard(name)
        finally:
            self._in_flight.pop(name, None)
            self._told.pop(name, None)
            self._restarting.discard(name)
            self._watch()

    async def progress(self) -> list[GenerationOutput]:
        """As the protocol says. Requests of several samples (``one_per_prompt``) are left out."""
        await self._core.call(self._core.llm.is_sleeping())  # the core's process lives, and is between two steps
        news = []
        so_far = {name: found for name, found in self._core.so_far().items() if name in self._in_flight}
        for name, (tokens, logprobs, versions) in so_far.items():
            told = self._told.get(name, 0)
            self._told[name] = len(tokens)
            if len(tokens) > told:
                news.append(GenerationOutput(name, ints(tokens[told:]), floats(logprobs[told:]), versions[told:]))
        return news

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As the protocol says; waits for ``resume`` while paused. Sequences are shorter than ``max_model_len``."""
        return await asyncio.gather(*(self._score(sequence) for sequence in sequences))

    async def _score(self, sequence: Sequence[int]) -> list[float]:
        if len(sequence) < 2:
            return []
        prompt = [int(token) for token in sequence]  # also of an array, whose numbers the core cannot read
        while True:  # until neither a weight update nor pause("abort") has cut it
            self._scores += 1
            scores: Any = None
            async for output in self._core.outputs(f"score-{self._scores}", prompt, scoring_parameters()):
                scores = output.prompt_logprobs
            if scores and len(scores) == len(sequence):  # the entry of the first token is empty
                return list(scores.logprobs)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        names = []
        for name, wanted in self._in_flight.items():
            given_up = wanted if request_ids is None else wanted.intersection(request_ids)
            if given_up:
                wanted -= set(given_up)
                names += [] if wanted else [name]
        self._restarting.difference_update(names)
        await self._core.call(self._core.llm.abort(names))

    # -- control ------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        async with self._control:
            await self._pause(mode)

    async def resume(self) -> None:
        async with self._control:
            await self._resume()

    async def _pause(self, mode: PauseMode) -> None:
        # Not clear_cache, which would throw away the kept requests' cache and compute it anew. And not
        # AsyncLLM.pause_generation, which sleeps for 20 ms more: the stamps do not need it.
        await self._core.call(self._core.llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False))
        self._paused.switch(True)
        self._watch()

    async def _resume(self) -> None:
        await self._core.call(self._core.llm.resume_generation())
        self._paused.switch(False)
        self._watch()

    async def update_weights(self, update: WeightUpdate) -> Sequence[str]:
        """As the protocol says; an engine that is not paused is paused ("keep") for the update.

        By ``cuda_ipc`` an update comes in parts, a call each (``info["last"]``), to an engine that is asleep but for
        its weights; one that comes late is given all of them, as by ``shared_memory``.

        An update that fails may leave layers without weights: the engine gives up, and every call raises.

        Raises:
            ValueError: for a backend other than the one the engine was started with.
            WeightMismatchError: for changes of weights that the engine does not hold; it goes on as before.
        """
        own = self.config.weight_sync_backend
        if update.backend not in ((own, "shared_memory") if own == CUDA_IPC else (own,)):
            raise ValueError(
                f"the engine was started for weight sync by {own!r}, and cannot take an update by {update.backend!r}"
            )
        self._held.begin(update)
        async with self._control:
            was_paused = self._paused.on or self._asleep
            if not was_paused:
                await self._pause("keep")
            try:
                unproven = await not_halfway(self._transfer(update))  # vLLM takes no other before this one has ended
            except asyncio.CancelledError:
                if not was_paused:
                    await self._resume()
                raise
            except TransferInterruptedError:
                if not was_paused:
                    await self._resume()
                raise
            except Exception as error:
                self._core.give_up(f"the update to version {update.version} failed: {error}")
                raise
            if is_whole(update):
                self._core.version = update.version
                self._held.complete(update)
                await self._restart_unbegun()
            if not was_paused:
                await self._resume()
            return unproven

    async def _transfer(self, update: WeightUpdate) -> Sequence[str]:
        """Which weights could never be compared with what was sent, by any of the workers."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        core, info = self._core, as_message(update.info)
        path = info.get("path", "")
        if path and "specs" not in info and (await asyncio.to_thread(read_about, path)).adapter:
            await core.load_adapter(path, update.version)
            return ["adapters, divided over ranks"] if self.config.tensor_parallel_size > 1 else []
        if info.get("about", {}).get("adapter"):
            path = await asyncio.to_thread(self._receive_file, info)
            try:
                await core.load_adapter(path, update.version)
            finally:
                remove_weights(path)
            return ["adapters, divided over ranks"] if self.config.tensor_parallel_size > 1 else []
        if update.backend == CUDA_IPC:
            info = own_part(info, self.config.extra.get("engine_index", 0))
        await core.call(core.llm.start_weight_update())
        await core.call(core.llm.update_weights(WeightTransferUpdateRequest(info)))
        interrupted = await self._interrupted() if "rendezvous" in info else ""
        version = str(update.version) if is_whole(update) and not interrupted else None
        await core.call(core.llm.finish_weight_update(weight_version=version))
        if interrupted:
            raise TransferInterruptedError(interrupted)
        if update.backend == "shared_memory" and self._unproven != []:  # what was right once stays so, or is an error
            ranks: list[list[str]] = await core.call(core.llm.collective_rpc("unproven"))
            self._unproven = sorted({name for names in ranks for name in names})
        return self._unproven or []

    async def _interrupted(self) -> str:
        """Why a broadcast did not arrive at all workers, or ""."""
        ranks: list[str] = await self._core.call(self._core.llm.collective_rpc("interrupted"))
        return next(filter(None, ranks), "")

    def _receive_file(self, info: dict[str, Any]) -> str:
        """A broadcast of adapters, which vLLM reads from a file."""
        import torch

        self._reader = self._reader or WeightReader(torch.device("cpu"))
        received = self._reader.read(info)
        return write_encoded(Encoded(received.weights, dict(received.digests), received.about, {}))

    async def _restart_unbegun(self) -> None:
        """Have the requests that vLLM holds without a token computed from the start, by the new weights."""
        names = self._core.unbegun()
        self._restarting.update(self._in_flight.keys() & names)
        await self._core.call(self._core.llm.abort(names))

    async def sleep(self) -> None:
        """Free weights and cache (vLLM's level 2). On a GPU only, with ``config.extra["sleep_mode"]``."""
        self._refuse_on_cpu()
        await self._core.call(self._core.llm.sleep(level=2, mode="wait"))
        self._asleep = True

    async def wake(self, part: WakePart) -> None:
        """vLLM schedules again when it is awake as a whole."""
        self._refuse_on_cpu()
        await self._core.call(self._core.llm.wake_up([VLLM_TAGS[part]]))
        self._asleep = self._asleep and part != "cache"

    def _refuse_on_cpu(self) -> None:
        if self._core.cpu:
            raise UserError("vLLM has no sleep mode on a CPU: use generator.backend=transformers there")

    # -- watching -----------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """``running`` requests have a token; those that wait for their first one are ``waiting``."""
        begun = self._core.begun_tokens()
        return EngineStats(
            running=len(begun),
            waiting=max(sum(map(len, self._in_flight.values())) - len(begun), 0),
            generated_tokens=self._finished_tokens + sum(begun),
            busy_s=self._busy.seconds,
            paused_s=self._paused.seconds,
            cache_tokens=self._core.cache_tokens,
            cache_used=self._core.cache_used,
        )

    def _watch(self) -> None:
        self._busy.switch(bool(self._in_flight) and not self._paused.on)


def _or_raise(output: GenerationOutput | EngineDiedError) -> GenerationOutput:
    if isinstance(output, EngineDiedError):
        raise output
    return output


def _answered(request: GenerationRequest, completion: CompletionOutput, versions: Ints) -> GenerationOutput:
    reason: Any = completion.finish_reason
    logprobs: Any = completion.logprobs  # flat, as they were asked for
    if reason not in ("stop", "length", "abort", "repetition", None):
        raise RequestFailedError(f"vLLM says {reason}")
    return GenerationOutput(
        request_id=request.request_id,
        token_ids=ints(completion.token_ids),
        logprobs=floats(logprobs.logprobs),
        versions=versions,
        finish_reason="length" if reason == "repetition" else reason,
    )
