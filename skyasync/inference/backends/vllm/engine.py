"""vLLM as an engine: ``AsyncLLM`` in this process, its core in a child process.

Invariant: a token's version is the one that vLLM's core sent along with it. The core changes its
version only while it is paused, between two steps, so every version is exact. No caller waits for a
core that has ended or whose weights are broken, and no process of it outlives this one
(``process_guard``).

A request that has a token keeps its cache over a weight update: its later tokens read keys and
values of the former weights, which is what "keep" means. A request without a token is started over.
The prefix cache is salted with the version, so that no prompt finds the blocks of an older one.

| who waits                | for what                      | woken by                                             |
|--------------------------|-------------------------------|------------------------------------------------------|
| ``generate``             | outputs of the core           | the core; its end (vLLM's monitor raises)            |
| ``score``                | the same, and for ``resume``  | the same                                             |
| control calls            | the core's answer, each other | the core; its end (looked for every half second)     |
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from skyasync.arrays import Experts, Ints, floats, ints
from skyasync.errors import MissingVLLMError, UserError
from skyasync.inference.backends.vllm.options import check_options
from skyasync.inference.backends.vllm.process_guard import ProcessGuard
from skyasync.inference.backends.vllm.setup import (
    ADAPTER_NAME,
    alike,
    check_adapters,
    check_expanded,
    engine_arguments,
    load_adapter,
    make_adapter_folder,
    prepare_environment,
    sampling_parameters,
    scoring_parameters,
)
from skyasync.inference.interface import (
    EngineConfig,
    EngineFailedError,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    NotSupportedError,
    PauseMode,
    RequestFailedError,
    Stopwatch,
    refusal,
)
from skyasync.models.config import load_config
from skyasync.models.images import Images, ImageTokens, decoded
from skyasync.models.vision import NEVER, ImageProcessor, is_vision, processor_of
from skyasync.utils.task_group import not_halfway
from skyasync.weight_sync.delta import Encoded
from skyasync.weight_sync.tensors import as_message
from skyasync.weight_sync.transfers.cuda_ipc import own_part
from skyasync.weight_sync.transfers.endpoints import WeightReader
from skyasync.weight_sync.transfers.file import read_metadata, remove_weights, write_encoded
from skyasync.weight_sync.update import (
    ADAPTER_ID,
    CUDA_IPC,
    CurrentContent,
    TransferInterruptedError,
    WakePart,
    WeightUpdate,
    is_whole,
)

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
POLL_S = 0.5  # how often a call checks whether the core is alive
SHUTDOWN_S = 1.0  # for vLLM to end by itself; the guard ends the rest
PROCESS_ENDED = "its process has ended (its own messages say why)"
NO_SLEEP = "vLLM has no sleep mode on a CPU: use generator.backend=transformers there"
VLLM_TAGS: dict[WakePart, str] = {"weights": "weights", "cache": "kv_cache"}
_starting = threading.Lock()  # the environment belongs to the process: one engine starts at a time


class VLLMEngine(InferenceEngine):
    """``config.extra``:

    - ``cpu_bind``: cores for the threads, on a CPU.
    - ``sleep_mode``: allow ``sleep``, on a GPU.
    - ``engine_index``: number among the engines. Each has random numbers of its own, and a place in
      the weight syncs by nccl and cuda_ipc.
    - ``one_per_prompt``: requests of one call that differ in their id alone are one request for
      vLLM, of which it draws n samples.

    Attributes:
        version: salts the prefix cache: a prompt finds only blocks of its own version.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.version = config.version
        self.cpu = True
        self._llm: AsyncLLM | None = None
        self._guard: ProcessGuard | None = None
        self._adapter: LoRARequest | None = None  # that requests are computed with
        self._end = "it was not started"  # why it cannot be called; empty while it can
        # A request of vLLM -> our requests that its samples answer.
        self._in_flight: dict[str, set[str]] = {}
        self._restarting_ids: set[str] = set()  # requests without a token that an update has ended
        self._scores = 0
        self._finished_tokens = 0
        # Tokens of unanswered requests that ``progress`` has returned.
        self._reported_tokens: dict[str, int] = {}
        self._busy_time = Stopwatch()
        self._paused_time = Stopwatch()
        self._control = asyncio.Lock()
        self._content = CurrentContent()
        self._reader: WeightReader | None = None  # of adapters by broadcast
        # Weights that no worker could compare yet; None before the first update.
        self._unproven: list[str] | None = None
        self._asleep = False  # weights or cache or both: nothing is scheduled
        self._images: ImageProcessor | None = None  # of a model that reads images

    # -- lifecycle
    # ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            await asyncio.to_thread(self._load)
            await self.call(self.llm.get_supported_tasks())  # vLLM remembers them; see ``outputs``
            await self.call(self.llm.update_weight_version(str(self.version)))
            if self._images is not None:
                ban = (self._images.banned, NEVER)  # no response may contain a placeholder
                await self.call(self.llm.collective_rpc("ban", args=ban))
        except BaseException:
            await self.shutdown()
            raise

    def _load(self) -> None:
        with _starting:
            prepare_environment(self.config)
            try:
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.platforms import current_platform
                from vllm.v1.engine.async_llm import AsyncLLM
            except ModuleNotFoundError as error:
                raise MissingVLLMError from error
            self.cpu = current_platform.is_cpu()
            if is_vision(load_config(self.config.model_path, {})):
                self._images = processor_of(self.config.model_path)
            check_options(self.config.extra.get("engine_kwargs", {}))
            check_adapters(self.config)
            arguments = AsyncEngineArgs(**engine_arguments(self.config, cpu=self.cpu))
            self._guard = ProcessGuard()
            with self._guard.marking():
                self._llm = AsyncLLM.from_engine_args(arguments)
            self._guard.note_shared_memory()
            self._end = ""

    async def shutdown(self) -> None:
        """End all processes; requests in flight raise ``EngineFailedError``. Safe to call twice."""
        llm = self._llm
        guard = self._guard
        self._give_up("it was shut down")
        self._llm = self._guard = None
        if llm is not None:
            if llm.output_handler is not None:  # it would log the core's end as a failure
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown, timeout=SHUTDOWN_S)
        if guard is not None:
            await asyncio.to_thread(guard.close)

    def _give_up(self, reason: str) -> None:
        """Make all later calls and all requests in flight raise."""
        self._end = reason
        if self._llm is not None:
            self._llm.output_processor.propagate_error(self._failure())

    def _failure(self) -> EngineFailedError:
        return EngineFailedError(
            f"the vLLM engine of {self.config.model_path} is not running: {self._end}"
        )

    @property
    def llm(self) -> AsyncLLM:
        """Raises ``EngineFailedError`` if it is not running."""
        if self._llm is None or self._end:
            raise self._failure()
        return self._llm

    async def call(self, answer: Awaitable[T]) -> T:
        """Await an answer of the core. vLLM itself would wait forever for a core that has ended."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(answer)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S)
                if not task.done() and self.llm.errored:
                    raise EngineDeadError
            return task.result()
        except EngineDeadError as error:
            self._end = self._end or PROCESS_ENDED
            raise self._failure() from error
        finally:
            task.cancel()

    # -- requests
    # -----------------------------------------------------------------------------------------

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
    ) -> AsyncIterator[list[GenerationOutput]]:
        outputs: list[GenerationOutput] = []
        failures: list[EngineFailedError] = []
        arrival = asyncio.Event()

        async def answer(bundle: list[GenerationRequest]) -> None:
            """Requests that are alike: vLLM draws a sample for each of one prompt."""
            names = {request.request_id for request in bundle}
            try:
                output = await self._output(bundle[0], names)
                answers = []
                for request, completion in zip(bundle, output.outputs, strict=True):
                    aborted = request.request_id not in names
                    answers.append(self._answer(request, completion, aborted=aborted))
                outputs.extend(answers)
            except EngineFailedError as error:
                failures.append(error)
            except Exception as error:
                # vLLM wraps the errors that it raises.
                cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
                outputs.extend(refusal(request, cause) for request in bundle)
            arrival.set()

        if self.config.extra.get("one_per_prompt"):
            bundles = alike(requests)
        else:
            bundles = [[request] for request in requests]
        tasks = [asyncio.create_task(answer(bundle)) for bundle in bundles]
        unanswered_count = len(requests)
        try:
            while unanswered_count:
                await arrival.wait()
                arrival.clear()
                if failures:
                    raise failures[0]
                batch = outputs.copy()
                outputs.clear()
                unanswered_count -= len(batch)
                yield batch
        finally:
            for task in tasks:
                task.cancel()

    def _answer(
        self,
        request: GenerationRequest,
        completion: CompletionOutput,
        *,
        aborted: bool,
    ) -> GenerationOutput:
        """A finished sample as the answer to a request.

        Args:
            aborted: the request was aborted, and vLLM continued for other samples of its bundle.
        """
        reason: Any = completion.finish_reason
        if reason not in ("stop", "length", "abort", "repetition", None):
            raise RequestFailedError(f"vLLM says {reason}")
        if aborted:
            reason = "abort"
        elif reason == "repetition":
            reason = "length"
        logprobs: Any = completion.logprobs  # flat, by ``sampling_parameters``
        return GenerationOutput(
            request.request_id,
            ints(completion.token_ids),
            floats(logprobs.logprobs),
            versions_of(completion),
            reason,
            self._experts(completion.routed_experts),
        )

    async def _output(self, request: GenerationRequest, names: set[str]) -> RequestOutput:
        """vLLM's output for a bundle of requests; it starts over at an update before a token.

        Args:
            request: one of the bundle.
            names: ids of the bundle, a sample each. ``abort`` removes ids, and ends the request
                when none is left.
        """
        parameters = sampling_parameters(request.fresh_sampling, samples=len(names))
        name = request.request_id
        prompt = request.prompt_token_ids.tolist()
        self._in_flight[name] = names
        self._watch()
        try:
            result: RequestOutput | None = None
            while result is None:
                async for output in self.outputs(name, prompt, parameters, request.images):
                    if output.finished and name not in self._restarting_ids:
                        result = output
                self._restarting_ids.discard(name)
            for completion in result.outputs:
                self._finished_tokens += len(versions_of(completion))
            return result
        finally:
            self._in_flight.pop(name, None)
            self._reported_tokens.pop(name, None)
            self._restarting_ids.discard(name)
            self._watch()

    async def outputs(
        self,
        name: str,
        tokens: list[int],
        parameters: SamplingParams,
        images: Images = (),
    ) -> AsyncIterator[RequestOutput]:
        """vLLM's outputs for one prompt.

        vLLM registers the request before its first suspension: its supported tasks are known since
        ``start``, and images are processed here. So no weight update comes between reading
        ``version`` and the list of requests that an update restarts.

        Raises:
            RequestFailedError: if the prompt's tokens are not those that vLLM makes of the images.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt: Any = tokens_input(tokens)
        if self._images is None and images:
            raise RequestFailedError("it has images, but the model reads only text")
        if self._images is not None:
            try:
                collapsed_tokens = self._images.collapse(tokens, images)
            except UserError as error:
                raise RequestFailedError(str(error)) from error
            if images:
                image_inputs = {"image": [decoded(image) for image in images]}
                text_and_images: Any = {
                    "prompt_token_ids": collapsed_tokens,
                    "multi_modal_data": image_inputs,
                }
                # Expands the placeholders.
                (prompt,) = await self.llm.renderer.render_cmpl_async([text_and_images])
                check_expanded(prompt["prompt_token_ids"], tokens)
                if not self._in_flight.get(name, True):
                    # It was aborted meanwhile, when vLLM did not know it: one token ends it.
                    parameters.min_tokens = 0
                    parameters.max_tokens = 1
        prompt["cache_salt"] = f"version {self.version}"
        try:
            async for output in self.llm.generate(
                prompt,
                parameters,
                name,
                lora_request=self._adapter,
            ):
                yield output
        except EngineDeadError as error:
            self._end = self._end or PROCESS_ENDED
            raise self._failure() from error
        except Exception:
            if self._end or self.llm.errored:
                raise self._failure() from None
            raise

    def states(self) -> list[Any]:
        """vLLM's records of the requests it holds (``RequestState``)."""
        if self._llm:
            return list(self._llm.output_processor.request_states.values())
        return []

    def token_counts(self) -> list[int]:
        """The number of tokens of each request that has any."""
        states = [state for state in self.states() if state.weight_version_starts]
        return [state.detokenizer.num_output_tokens() for state in states]

    async def heartbeat(self) -> None:
        await self.call(self.llm.is_sleeping())  # which the core answers

    async def progress(self) -> list[GenerationOutput]:
        """Requests of several samples (``one_per_prompt``) are left out."""
        await self.heartbeat()
        outputs = []
        for state in self.states():
            name = state.external_req_id
            if not state.weight_version_starts or name not in self._in_flight:
                continue
            if state.parent_req is not None:
                continue
            start = self._reported_tokens.get(name, 0)
            tokens = state.detokenizer.output_token_ids
            self._reported_tokens[name] = len(tokens)
            if len(tokens) > start:
                outputs.append(self._new_tokens(state, start))
        return outputs

    def _new_tokens(self, state: Any, start: int) -> GenerationOutput:  # noqa: ANN401  (of vLLM)
        """The tokens of a running request from number ``start`` on."""
        tokens = state.detokenizer.output_token_ids
        logprobs = state.logprobs_processor.logprobs.logprobs
        versions, starts = zip(*state.weight_version_starts, strict=True)
        lengths = np.diff([*starts, len(tokens)])
        token_versions = np.repeat(ints([int(version) for version in versions]), lengths)
        output = GenerationOutput(
            state.external_req_id,
            ints(tokens[start:]),
            floats(logprobs[start:]),
            token_versions[start:],
        )
        if state.routed_experts_chunks:
            # Chunks begin with the prompt's tokens; the last token is not computed yet.
            reported_experts = state.prompt_len + start - 1 if start else 0
            experts = np.concatenate(state.routed_experts_chunks)
            output.experts = self._experts(experts[reported_experts:])
        return output

    def _experts(self, routed_experts: Experts | None) -> Experts | None:
        """vLLM's experts as uint8 or int16: with room for a number that marks unknown experts."""
        if routed_experts is None:
            return None
        experts: int = self.llm.vllm_config.model_config.get_num_experts()
        one_byte = experts <= np.iinfo(np.uint8).max
        return routed_experts.astype(np.uint8 if one_byte else np.int16, copy=False)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Waits for ``resume`` while paused. Sequences are shorter than ``max_model_len``."""
        return await asyncio.gather(*map(self._score, sequences))

    async def _score(self, sequence: Sequence[int]) -> list[float]:
        if len(sequence) < 2:
            return []
        prompt = [int(token) for token in sequence]  # the core cannot read an array's numbers
        images = ImageTokens.images_of(sequence)
        while True:  # until neither a weight update nor pause("abort") has cut it
            self._scores += 1
            name = f"score-{self._scores}"
            scores: Any = None
            async for output in self.outputs(name, prompt, scoring_parameters(), images):
                scores = output.prompt_logprobs
            if not scores or len(scores) != len(sequence):  # the entry of the first token is empty
                continue
            logprobs = list(scores.logprobs)
            if images and self._images is not None:
                for position, token in enumerate(prompt[1:]):
                    if token == self._images.placeholder:
                        logprobs[position] = 0.0
            return logprobs

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        ended_names = []
        for name, names in self._in_flight.items():
            aborted_ids = set(names if request_ids is None else names.intersection(request_ids))
            names -= aborted_ids  # in place: the set is that of ``_output``
            if aborted_ids and not names:
                ended_names.append(name)
        self._restarting_ids.difference_update(ended_names)
        await self.call(self.llm.abort(ended_names))

    # -- control
    # ------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        async with self._control:
            await self._set_paused(mode)

    async def resume(self) -> None:
        async with self._control:
            await self._set_paused(None)

    async def _set_paused(self, mode: PauseMode | None) -> None:
        if mode is None:
            await self.call(self.llm.resume_generation())
        else:
            # Not clear_cache, which would drop the running requests' cache and compute it again.
            # And not AsyncLLM.pause_generation, which sleeps for 20 ms more: exact versions do not
            # need it.
            core = self.llm.engine_core
            await self.call(core.pause_scheduler_async(mode=mode, clear_cache=False))
        self._paused_time.switch(mode is not None)
        self._watch()

    async def update_weights(self, update: WeightUpdate) -> Sequence[str]:
        """An engine that is not paused is paused ("keep") for the update.

        By ``cuda_ipc`` an update comes in several calls (``info["last"]``), to an engine of which
        only the weights are awake. A late-joining engine gets all of them at once, by
        ``shared_memory``. Requests without a token start over.

        An update that fails may leave layers without weights: the engine gives up, and every call
        raises.

        Raises:
            ValueError: for a backend other than the one the engine was started with.
            WeightMismatchError: for the delta of weights that the engine does not have; it
                continues as before.
        """
        configured_backend = self.config.weight_sync_backend
        backends = {configured_backend}
        if configured_backend == CUDA_IPC:
            backends.add("shared_memory")
        if update.backend not in backends:
            raise ValueError(
                f"the engine was started for weight sync by {configured_backend!r}, and cannot take an update by "
                f"{update.backend!r}"
            )
        self._content.begin(update)
        async with self._control:
            was_paused = self._paused_time.on or self._asleep
            if not was_paused:
                await self._set_paused("keep")
            try:
                # vLLM accepts no other update before this one has ended.
                unproven = await not_halfway(self._transfer(update))
            except (asyncio.CancelledError, TransferInterruptedError):
                if not was_paused:
                    await self._set_paused(None)
                raise
            except Exception as error:
                self._give_up(f"the update to version {update.version} failed: {error}")
                raise
            if is_whole(update):
                if self._images is not None:  # it has features of images by the former weights
                    await self.call(self.llm.reset_encoder_cache())
                self.version = update.version
                self._content.complete(update)
                await self._restart_requests()
            if not was_paused:
                await self._set_paused(None)
            return unproven

    async def _restart_requests(self) -> None:
        """Start the requests without a token over: their prompts are of the former version."""
        states = [state for state in self.states() if not state.weight_version_starts]
        names = [state.external_req_id for state in states]
        self._restarting_ids.update(self._in_flight.keys() & names)
        await self.call(self.llm.abort(names))

    async def _transfer(self, update: WeightUpdate) -> Sequence[str]:
        """Load an update; returns the weights that no worker could compare with what was sent."""
        import torch
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = as_message(update.info)
        path = info.get("path", "")
        if info.get("about", {}).get("adapter"):
            # A broadcast of adapters, which vLLM reads from a file.
            self._reader = self._reader or WeightReader(torch.device("cpu"))
            adapters = await asyncio.to_thread(self._reader.read, info)
            encoded = Encoded(adapters.weights, dict(adapters.digests), adapters.header, {})
            file = await asyncio.to_thread(write_encoded, encoded)
            try:
                return await self._load_adapter(file, update.version)
            finally:
                remove_weights(file)
        if path and "specs" not in info:
            _, header = await asyncio.to_thread(read_metadata, path)
            if header.adapter:
                return await self._load_adapter(path, update.version)
        if update.backend == CUDA_IPC:
            info = own_part(info, self.config.extra.get("engine_index", 0))
        await self.call(self.llm.start_weight_update())
        await self.call(self.llm.update_weights(WeightTransferUpdateRequest(info)))
        interruption = ""  # why a broadcast did not arrive at all workers
        if "rendezvous" in info:
            reasons: list[str] = await self.call(self.llm.collective_rpc("interrupted"))
            interruption = next(filter(None, reasons), "")
        complete = is_whole(update) and not interruption
        version = str(update.version) if complete else None
        await self.call(self.llm.finish_weight_update(weight_version=version))
        if interruption:
            raise TransferInterruptedError(interruption)
        # Once all weights could be compared, a later difference is an error of the update.
        if update.backend == "shared_memory" and self._unproven != []:
            ranks: list[list[str]] = await self.call(self.llm.collective_rpc("unproven"))
            self._unproven = sorted(set[str]().union(*ranks))
        return self._unproven or []

    async def _load_adapter(self, path: str, version: int) -> list[str]:
        """Load a file of adapters, with which later requests are computed.

        Returns the weights that no worker could compare with what was sent.
        """
        from vllm.lora.request import LoRARequest

        folder = await asyncio.to_thread(make_adapter_folder, path)
        await self.call(load_adapter(self.llm, folder, path))
        # vLLM has it by its number, and does not read the path.
        self._adapter = LoRARequest(ADAPTER_NAME, ADAPTER_ID, lora_path="loaded already")
        await self.call(self.llm.update_weight_version(str(version)))
        if self.config.tensor_parallel_size > 1:
            return ["adapters, divided over ranks"]
        return []

    async def sleep(self) -> None:
        """Free weights and cache (vLLM's level 2).

        On a GPU only, with ``config.extra["sleep_mode"]``.
        """
        if self.cpu:
            raise NotSupportedError(NO_SLEEP)
        await self.call(self.llm.sleep(level=2, mode="wait"))
        self._asleep = True

    async def wake(self, part: WakePart) -> None:
        """Undo ``sleep``; vLLM schedules requests again when both parts are awake."""
        if self.cpu:
            raise NotSupportedError(NO_SLEEP)
        await self.call(self.llm.wake_up([VLLM_TAGS[part]]))
        self._asleep = self._asleep and part != "cache"

    # -- watching
    # -----------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """``running`` requests have a token; requests without one are ``waiting``."""
        counts = self.token_counts()
        tokens = sum(counts)
        cache_tokens = 0
        cache_used = None
        if self._llm is not None:
            cache = self._llm.vllm_config.cache_config
            cache_tokens = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
            if cache_tokens:
                cache_used = self._prompt_tokens(shared=cache.enable_prefix_caching) + tokens
        requests = sum(map(len, self._in_flight.values()))
        return EngineStats(
            running=len(counts),
            waiting=max(requests - len(counts), 0),
            generated_tokens=self._finished_tokens + tokens,
            busy_s=self._busy_time.seconds,
            paused_s=self._paused_time.seconds,
            cache_tokens=cache_tokens,
            cache_used=cache_used,
        )

    def _prompt_tokens(self, *, shared: bool) -> int:
        """Tokens of the cache that the prompts of running requests take.

        Args:
            shared: equal prompts are in the cache once; else those of one bundle are.
        """
        lengths: dict[object, int] = {}
        for state in self.states():
            if state.weight_version_starts:
                prompt: object = (state.parent_req or state).external_req_id
                if shared and state.prompt_token_ids:
                    prompt = tuple(state.prompt_token_ids)
                lengths[prompt] = state.prompt_len
        return sum(lengths.values())

    def _watch(self) -> None:
        self._busy_time.switch(bool(self._in_flight) and not self._paused_time.on)


def versions_of(completion: CompletionOutput) -> Ints:
    """The version of each token of a finished sample."""
    versions = []
    lengths = []
    for span in completion.weight_versions or ():
        versions.append(int(span.version))
        lengths.append(span.end - span.start)
    return np.repeat(ints(versions), ints(lengths))
