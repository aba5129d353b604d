"""vLLM's ``AsyncLLM`` and the processes behind it: started, asked, and ended.

Invariant: no caller waits for a core that is dead or whose weights are broken, and no process of it
outlives this one (see ``process_guard``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from skyasync.arrays import Ints, ints
from skyasync.engines.process_guard import ProcessGuard
from skyasync.engines.protocol import EngineConfig, EngineDiedError
from skyasync.engines.vllm import adapter
from skyasync.engines.vllm.setup import engine_arguments, prepare_environment
from skyasync.errors import MissingVLLMError

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

T = TypeVar("T")
POLL_S = 0.5  # how often a call looks whether the core still lives
SHUTDOWN_S = 1.0  # for vLLM to end by itself; the guard ends the rest
_starting = threading.Lock()  # the environment belongs to the process: one engine starts at a time


class VLLMCore:
    """One vLLM engine. ``version`` salts the prefix cache: a prompt finds only blocks of its own version."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.version = config.version
        self.cpu = True
        self._engine: AsyncLLM | None = None
        self._guard: ProcessGuard | None = None
        self._adapter: LoRARequest | None = None  # that requests are computed with
        self._end = "it was not started"  # why it cannot be asked; empty while it can

    # -- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            await asyncio.to_thread(self._load)
            await self.call(self.llm.get_supported_tasks())  # vLLM remembers them; see ``outputs``
            await self.call(self.llm.update_weight_version(str(self.version)))
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
            arguments = AsyncEngineArgs(**engine_arguments(self.config, cpu=self.cpu))
            self._guard = ProcessGuard()
            with self._guard.marking():
                self._engine = AsyncLLM.from_engine_args(arguments)
            self._guard.note_shared_memory()
            self._end = ""

    async def shutdown(self) -> None:
        """End all processes; whoever still waits for an answer gets ``EngineDiedError``. Safe to call twice."""
        engine, guard = self._engine, self._guard
        self.give_up("it was shut down")
        self._engine = self._guard = None
        if engine is not None:
            if engine.output_handler is not None:  # it would log the core's end as a failure
                engine.output_handler.cancel()
            await asyncio.to_thread(engine.shutdown, timeout=SHUTDOWN_S)
        if guard is not None:
            await asyncio.to_thread(guard.close)

    def give_up(self, reason: str) -> None:
        """From now on every call raises, and so does every request in flight."""
        self._end = reason
        if self._engine is not None:
            self._engine.output_processor.propagate_error(self.died())

    def died(self) -> EngineDiedError:
        return EngineDiedError(f"the vLLM engine of {self.config.model_path} is not running: {self._end}")

    @property
    def llm(self) -> AsyncLLM:
        """Raises ``EngineDiedError`` where there is none to be asked."""
        if self._engine is None or self._end:
            raise self.died()
        return self._engine

    @property
    def cache_tokens(self) -> int:
        """Those that its cache holds; 0 where there is none."""
        if self._engine is None:
            return 0
        cache = self._engine.vllm_config.cache_config
        return (cache.num_gpu_blocks or 0) * (cache.block_size or 0)

    @property
    def cache_used(self) -> int | None:
        """How many of them requests with tokens take, by these; a prompt that several have is there once if vLLM shares
        it. What waits for its first token has next to nothing. None where there is no cache."""
        if not self.cache_tokens:
            return None
        begun = [state for state in self.states() if state.weight_version_starts]
        shared = self.llm.vllm_config.cache_config.enable_prefix_caching
        prompts: dict[object, int] = {}
        for state in begun:
            owner = tuple(state.prompt_token_ids or ()) if shared else (state.parent_req or state).external_req_id
            prompts[owner] = state.prompt_len
        return sum(prompts.values()) + sum(self.begun_tokens())

    @property
    def process_mark(self) -> str:
        """What its processes can be found by: ``process_guard.guarded(mark)``."""
        if self._guard is None:
            raise self.died()
        return self._guard.mark

    async def load_adapter(self, path: str, version: int) -> None:
        """From now on requests are computed with a file's adapter; the scheduler is paused. See ``adapter``."""
        folder = await asyncio.to_thread(adapter.make_folder, path)
        await self.call(adapter.load(self.llm, folder, path))
        self._adapter = adapter.requested()
        await self.call(self.llm.update_weight_version(str(version)))

    async def call(self, answer: Awaitable[T]) -> T:
        """Await an answer of the core. vLLM itself would wait for a dead one for ever."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(answer)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S)
                if not task.done() and self.llm.errored:
                    raise EngineDeadError
            return task.result()
        except EngineDeadError as error:
            self._end = self._end or "its process died (its own messages say why)"
            raise self.died() from error
        finally:
            task.cancel()

    # -- requests -----------------------------------------------------------------------------------------

    async def outputs(self, name: str, tokens: list[int], parameters: SamplingParams) -> AsyncIterator[RequestOutput]:
        """vLLM's outputs for one prompt.

        vLLM registers the request before its first suspension (it knows its supported tasks by then), so that
        no weight update comes between the reading of ``version`` and ``unbegun``.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = tokens_input(tokens, cache_salt=f"version {self.version}")
        try:
            async for output in self.llm.generate(prompt, parameters, name, lora_request=self._adapter):
                yield output
        except EngineDeadError as error:
            self._end = self._end or "its process died (its own messages say why)"
            raise self.died() from error
        except Exception:
            if self._end or self.llm.errored:
                raise self.died() from None
            raise

    def states(self) -> list[Any]:
        """vLLM's records of the requests it holds (``RequestState``)."""
        return list(self._engine.output_processor.request_states.values()) if self._engine else []

    def unbegun(self) -> list[str]:
        """Requests, scores included, that have no token yet."""
        return [state.external_req_id for state in self.states() if not state.weight_version_starts]

    def begun_tokens(self) -> list[int]:
        """For each request that has tokens, how many."""
        return [s.detokenizer.num_output_tokens() for s in self.states() if s.weight_version_starts]

    def versions(self, name: str, output: RequestOutput) -> Ints:
        """The version of each token of the response so far; vLLM itself reports it with the last output only."""
        if output.finished:
            return versions_of(output.outputs[0])
        processor = self.llm.output_processor
        return _versions_so_far(processor.request_states[processor.external_req_ids[name][0]])

    def so_far(self) -> dict[str, tuple[list[int], list[float], Ints]]:
        """Tokens, log-probabilities and versions of each request that has begun and wants one sample."""
        return {
            state.external_req_id: (
                state.detokenizer.output_token_ids,
                state.logprobs_processor.logprobs.logprobs,
                _versions_so_far(state),
            )
            for state in self.states()
            if state.weight_version_starts and state.parent_req is None
        }


def _versions_so_far(state: RequestState) -> Ints:
    assert state.detokenizer is not None  # vLLM counts the tokens of a request by it
    versions, starts = zip(*state.weight_version_starts, strict=True)
    ends = [*starts[1:], state.detokenizer.num_output_tokens()]
    return np.repeat(ints([int(version) for version in versions]), np.subtract(ends, starts))


def versions_of(completion: CompletionOutput) -> Ints:
    """The version of each token of a finished sample."""
    spans = completion.weight_versions or []
    return np.repeat(ints([int(span.version) for span in spans]), ints([span.end - span.start for span in spans]))
