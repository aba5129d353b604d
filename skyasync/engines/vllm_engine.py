"""vLLM behind the engine protocol: ``AsyncLLM`` in this process, its core in a child process.

Invariant: a token's version is the one that vLLM's core sent along with it. The core changes its version
only while it is paused, between two steps, so a stamp cannot be off by a token.

What is cached under which weights: a request that has begun keeps its cache over a weight update (its later
tokens read keys and values of the former weights; that is what "keep" means). Nothing else does: a request
that has no token yet is started over, and the prefix cache is salted with the version, so that no prompt
finds the blocks of an older one.

| who waits                | for what                      | woken by                                          |
|--------------------------|-------------------------------|---------------------------------------------------|
| ``generate``, ``stream`` | outputs of the core           | the core; its death (vLLM's monitor raises)       |
| control calls            | the core's answer             | the core; its death (looked for every ``POLL_S``) |
| ``score``                | as ``generate``; ``resume``   | as ``generate``                                   |
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from skyasync.engines.process_guard import ProcessGuard
from skyasync.engines.protocol import (
    ENGINES,
    EngineConfig,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    PauseMode,
)
from skyasync.engines.stopwatch import Stopwatch
from skyasync.engines.vllm_setup import (
    engine_arguments,
    prepare_environment,
    sampling_parameters,
    scoring_parameters,
)
from skyasync.errors import MissingExtraError, UserError
from skyasync.weight_sync.update import WeightUpdate

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
POLL_S = 0.5  # how often a control call looks whether the core still lives
_starting = threading.Lock()  # the environment belongs to the process: one engine starts at a time


class EngineDiedError(RuntimeError):
    """The engine's process has ended; whatever it was computing is lost."""


@ENGINES.register("vllm")
class VLLMEngine:
    """See ``InferenceEngine`` for the methods.

    ``config.extra``: ``cpu_bind`` (cores for the threads, CPU), ``sleep_mode`` (allow ``sleep``, GPU),
    ``engine_index`` (place among the engines; needed by the nccl weight sync with several).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._version = config.version
        self._engine: AsyncLLM | None = None
        self._guard: ProcessGuard | None = None
        self._cpu = True
        self._in_flight: set[str] = set()
        self._restarting: set[str] = set()
        self._scored = 0
        self._finished_tokens = 0
        self._busy, self._paused = Stopwatch(), Stopwatch()
        self._control = asyncio.Lock()
        self._joined_transfer = False

    # -- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await asyncio.to_thread(self._load)
        await self._call(self._llm.get_supported_tasks())  # vLLM remembers them; see _prompt
        await self._call(self._llm.update_weight_version(str(self._version)))

    def _load(self) -> None:
        with _starting:
            prepare_environment(self.config)
            try:
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.platforms import current_platform
                from vllm.v1.engine.async_llm import AsyncLLM
            except ModuleNotFoundError as error:
                raise MissingExtraError("vLLM", "vllm (with a GPU) or --extra cpu (without)") from error
            self._cpu = current_platform.is_cpu()
            arguments = AsyncEngineArgs(**engine_arguments(self.config, cpu=self._cpu))
            self._guard = ProcessGuard()
            with self._guard.marking():
                self._engine = AsyncLLM.from_engine_args(arguments)

    async def shutdown(self) -> None:
        engine, self._engine = self._engine, None
        guard, self._guard = self._guard, None
        if engine is not None:
            engine.output_processor.propagate_error(EngineDiedError("the engine was shut down"))
            await asyncio.to_thread(engine.shutdown)
        if guard is not None:
            await asyncio.to_thread(guard.close)

    # -- requests -----------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[GenerationOutput]]:
        finished: list[GenerationOutput | BaseException] = []
        arrived = asyncio.Event()

        async def answer(request: GenerationRequest) -> None:
            try:
                finished.append(await self._answer(request))
            except Exception as error:
                finished.append(error)
            arrived.set()

        tasks = [asyncio.create_task(answer(request)) for request in requests]
        unanswered = len(tasks)
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

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        sent = 0
        async for output in self._outputs(request, streaming=True):
            delta = _answered(request, output, self._spans(request.request_id, output))
            delta.versions = delta.versions[sent:]
            sent += len(delta.token_ids)
            yield delta

    async def _answer(self, request: GenerationRequest) -> GenerationOutput:
        answers = [
            _answered(request, output, output.outputs[0].weight_versions)
            async for output in self._outputs(request, streaming=False)
        ]
        return answers[-1]

    async def _outputs(self, request: GenerationRequest, *, streaming: bool) -> AsyncIterator[RequestOutput]:
        """vLLM's outputs; a request that a weight update found without a token is started over."""
        parameters = sampling_parameters(request.sampling, streaming=streaming)
        name = request.request_id
        self._in_flight.add(name)
        self._watch()
        try:
            while True:
                async for output in self._vllm_outputs(name, request.prompt_token_ids, parameters):
                    if output.finished and name in self._restarting:
                        continue
                    if output.finished:
                        self._finished_tokens += _length(output)
                    yield output
                if name not in self._restarting:
                    return
                self._restarting.discard(name)
        finally:
            self._in_flight.discard(name)
            self._restarting.discard(name)
            self._watch()

    async def _vllm_outputs(self, name: str, tokens: Sequence[int], parameters: Any) -> AsyncIterator[RequestOutput]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            # vLLM registers the request before its first suspension, so no weight update can come between
            # the salt and the list of requests that have no token yet.
            prompt = {"type": "token", "prompt_token_ids": list(tokens), "cache_salt": f"version {self._version}"}
            async for output in self._llm.generate(prompt, parameters, name):
                yield output
        except EngineDeadError as error:
            raise self._died() from error

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As the protocol says. Waits for ``resume`` while paused; sequences shorter than ``max_model_len``."""
        return await asyncio.gather(*(self._score(sequence) for sequence in sequences))

    async def _score(self, sequence: Sequence[int]) -> list[float]:
        if len(sequence) < 2:
            return []
        while True:  # until neither a weight update nor pause("abort") has cut it
            self._scored += 1
            name, scores = f"score-{id(self)}-{self._scored}", None
            async for output in self._vllm_outputs(name, sequence, scoring_parameters()):
                scores = output.prompt_logprobs
            if scores and len(scores) == len(sequence):  # the first token's entry is empty
                return list(scores.logprobs)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        names = self._in_flight if request_ids is None else self._in_flight & set(request_ids)
        self._restarting -= names
        await self._call(self._llm.abort(list(names)))

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
        await self._call(self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False))
        self._paused.switch(True)
        self._watch()

    async def _resume(self) -> None:
        await self._call(self._llm.resume_generation())
        self._paused.switch(False)
        self._watch()

    async def update_weights(self, update: WeightUpdate) -> None:
        """As the protocol says; an engine that is not paused is paused ("keep") for the update.

        Raises:
            ValueError: for a backend other than the one the engine was started with.
        """
        if update.backend != self.config.weight_sync_backend:
            raise ValueError(
                f"the engine was started for weight sync by {self.config.weight_sync_backend!r}, "
                f"and cannot take an update by {update.backend!r}"
            )
        async with self._control:
            was_paused = self._paused.on
            if not was_paused:
                await self._pause("keep")
            await self._transfer(update)
            self._version = update.version
            await self._restart_unbegun()
            if not was_paused:
                await self._resume()

    async def _transfer(self, update: WeightUpdate) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        info = update.info
        if update.backend == "nccl":
            from skyasync.weight_sync.nccl import join_info

            if not self._joined_transfer:
                join = join_info(info, self.config.extra.get("engine_index", 0), self.config.tensor_parallel_size)
                await self._call(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(join)))
                self._joined_transfer = True
            info = info["parameters"]
        await self._call(self._llm.start_weight_update())
        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(info)))
        await self._call(self._llm.finish_weight_update(weight_version=str(update.version)))

    async def _restart_unbegun(self) -> None:
        """Have the requests that vLLM holds without a token computed from the start, by the new weights."""
        states = self._llm.output_processor.request_states.values()
        names = [state.external_req_id for state in states if not state.weight_version_starts]
        self._restarting.update(self._in_flight.intersection(names))
        await self._call(self._llm.abort(names))

    async def sleep(self) -> None:
        """Free weights and cache (vLLM's level 2). GPU only, with ``config.extra["sleep_mode"]``."""
        if self._cpu:
            raise UserError("vLLM has no sleep mode on a CPU: use generator.backend=transformers there")
        await self._call(self._llm.sleep(level=2, mode="wait"))

    async def wake(self) -> None:
        if self._cpu:
            raise UserError("vLLM has no sleep mode on a CPU: use generator.backend=transformers there")
        await self._call(self._llm.wake_up())

    # -- watching -----------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """``running`` requests have a token; those that wait for their first one are ``waiting``."""
        states = self._engine.output_processor.request_states.values() if self._engine else ()
        begun = [state for state in states if state.weight_version_starts]
        return EngineStats(
            running=len(begun),
            waiting=len(self._in_flight) - len(begun),
            generated_tokens=self._finished_tokens + sum(state.detokenizer.num_output_tokens() for state in begun),
            busy_s=self._busy.seconds,
            paused_s=self._paused.seconds,
        )

    def _watch(self) -> None:
        self._busy.switch(bool(self._in_flight) and not self._paused.on)

    def _spans(self, name: str, output: RequestOutput) -> Any:
        """Which tokens of the response so far carry which version: vLLM reports it with the last output only."""
        from vllm.outputs import WeightVersionSpan

        if output.finished:
            return output.outputs[0].weight_versions
        processor = self._llm.output_processor
        state = processor.request_states[processor.external_req_ids[name][0]]
        starts = state.weight_version_starts
        ends = [start for _, start in starts[1:]] + [state.detokenizer.num_output_tokens()]
        return [WeightVersionSpan(version, start, end) for (version, start), end in zip(starts, ends, strict=True)]

    @property
    def _llm(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineDiedError("the vLLM engine is not running: it was not started, or was shut down")
        return self._engine

    def _died(self) -> EngineDiedError:
        return EngineDiedError(f"the vLLM engine of {self.config.model_path} died; its own log says why")

    async def _call(self, answer: Awaitable[T]) -> T:
        """Await an answer of the core. vLLM itself would wait for a dead one for ever."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(answer)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S)
                if not task.done() and self._llm.errored:
                    raise self._died()
            return task.result()
        except EngineDeadError as error:
            raise self._died() from error
        finally:
            task.cancel()


def _or_raise(output: GenerationOutput | BaseException) -> GenerationOutput:
    if isinstance(output, BaseException):
        raise output
    return output


def _length(output: RequestOutput) -> int:
    """Tokens of a finished response, those already streamed included."""
    return max((span.end for span in output.outputs[0].weight_versions or ()), default=0)


def _answered(request: GenerationRequest, output: RequestOutput, spans: Any) -> GenerationOutput:
    completion = output.outputs[0]
    reason: Any = completion.finish_reason
    return GenerationOutput(
        request_id=request.request_id,
        token_ids=list(completion.token_ids),
        logprobs=list(completion.logprobs.logprobs) if completion.logprobs else [],
        versions=[int(span.version) for span in spans or () for _ in range(span.start, span.end)],
        finish_reason=reason if reason in ("stop", "length", "abort", None) else "abort",
    )
