"""An engine in a Ray actor, called like a local one.

Invariant: nothing here blocks the caller's event loop; the actor runs from the engine's making to
``shutdown`` and ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any, ClassVar

import ray

from skyasync.errors import UserError
from skyasync.heap import freeze_start
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    EngineFailedError,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
)
from skyasync.utils.machine import ProcessIdentity
from skyasync.weight_sync.update import WeightUpdate

log = logging.getLogger(__name__)

#: The user's terminal shows the run's progress, not that of every library's loading.
QUIET = {
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

# Calls that an engine's process serves at once. Requests at a paused engine are calls too: if they
# could take all places, the call that resumes the engine would find none.
CALLS = 1_000_000

MESSAGE_TOKENS = 2**18  # 3 MB: the reader of a longer message would do nothing else for too long
SHUTDOWN_S = 20.0  # for an engine to end its work by itself; then its process is killed


class _EngineActor:
    """The process of an engine, which loads the engine's libraries."""

    def __init__(self, backend: str, user_engines: dict[str, Any]) -> None:
        # Before the engine's libraries are imported, here and in processes that they start.
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        ENGINES.update(user_engines)
        self._backend = backend
        ENGINES.find(backend)  # imports it, while the caller does other things
        self._engine: InferenceEngine

    async def start(self, config: EngineConfig) -> ProcessIdentity:
        self._engine = ENGINES.make(self._backend, config)
        await self._engine.start()
        freeze_start()
        return ProcessIdentity.mine()

    async def call(self, method: str, *args: object) -> object:
        return await methodcaller(method, *args)(self._engine)

    async def generate(
        self,
        requests: list[GenerationRequest],
    ) -> AsyncIterator[list[GenerationOutput]]:
        async for outputs in self._engine.generate(requests):
            for message in messages(outputs):
                yield message


def messages(outputs: Sequence[GenerationOutput]) -> Iterator[list[GenerationOutput]]:
    """The outputs in order, in lists of about ``MESSAGE_TOKENS``.

    Reading a message blocks the reader's event loop.
    """
    message: list[GenerationOutput] = []
    tokens = 0
    for output in outputs:
        message.append(output)
        tokens += len(output.token_ids)
        if tokens >= MESSAGE_TOKENS:
            yield message
            message = []
            tokens = 0
    if message:
        yield message


class RayEngine(InferenceEngine):
    """The handle of an engine in a Ray actor.

    The constructor starts the engine's process, so Ray must be up. Methods of ``REMOTE`` call those
    of the engine there.

    Args:
        options: Ray's actor options (resources, placement); an attribute too.
        start_timeout_s: how long the model may take to load.
    """

    restartable: ClassVar[bool] = True

    def __init__(
        self,
        backend: str,
        config: EngineConfig,
        options: dict[str, Any] | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(config)
        self.backend = backend
        self._start_timeout_s = start_timeout_s
        self._start_was_called = False
        self._process: ProcessIdentity | None = None
        self.options = options or {}
        actor_class = ray.remote(_EngineActor).options(max_concurrency=CALLS, **self.options)
        self._actor: Any = actor_class.remote(backend, ENGINES.user_parts())

    def set_threads(self, threads: int) -> None:
        self.config = replace(self.config, threads=threads)

    async def start(self) -> None:
        self._start_was_called = True
        try:
            async with asyncio.timeout(self._start_timeout_s):
                with self._alive() as actor:
                    self._process = await actor.start.remote(self.config)
                self.node = self._process.node
        except TimeoutError as error:
            raise TimeoutError(
                f"the {self.backend} engine did not start within {self._start_timeout_s:g} s "
                f"(generator.engine_start_timeout_s)"
            ) from error

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
    ) -> AsyncIterator[list[GenerationOutput]]:
        with self._alive() as actor:
            stream = actor.generate.options(num_returns="streaming")
            async for reference in stream.remote(list(requests)):
                yield await reference

    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None:
        async with update.on(self.node) as local_update:
            unproven: Sequence[str] | None = await self._remote("update_weights", local_update)
            return unproven

    async def _remote(self, method: str, *args: object) -> Any:  # noqa: ANN401  (what the engine's method returns)
        with self._alive() as actor:
            return await actor.call.remote(method, *args)

    @contextlib.contextmanager
    def _alive(self) -> Iterator[Any]:
        """The actor. Raises EngineFailedError if it ends in the block, or was ended before it."""
        if self._actor is None:
            raise EngineFailedError(f"the {self.backend} engine has been ended")
        try:
            yield self._actor
        # Ray's memory monitor kills actors too, with an error of another class.
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise EngineFailedError(str(error)) from error

    async def shutdown(self) -> None:
        """Let the engine release what it holds, then end its process in any case."""
        if self._actor is None:
            return
        actor = self._actor
        self._actor = None
        if self._start_was_called:  # else it holds nothing, and may still be importing
            # The process is killed in any case; an error here has nothing to add.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(SHUTDOWN_S):
                    await actor.call.remote("shutdown")
        ray.kill(actor)

    def kill(self) -> None:
        """End the engine's process and its children, also if it hangs. Safe to call twice."""
        if self._actor is not None:
            actor = self._actor
            self._actor = None
            ray.kill(actor)
        if self._process is not None:
            self._process.end()

    def successor(self) -> RayEngine:
        return RayEngine(self.backend, self.config, self.options, self._start_timeout_s)

    @staticmethod
    def one_more(
        engines: Sequence[InferenceEngine],
        left: Iterable[bool],
        devices: int,
        *,
        may_grow: bool = False,
    ) -> RayEngine:
        """Another engine like these, not started. Blocks.

        It gets the resources of an engine that has left, or else free resources of Ray.

        Args:
            left: of each engine, whether it has left; the resources of a failed engine are its
                replacement's.
            devices: GPUs of an engine; 0 without GPUs: engines then share the cores.
            may_grow: request GPUs that Ray does not have, until the engine's start times out: Ray's
                autoscaler may add a node.

        Raises:
            UserError: if Ray has too few free GPUs, and ``may_grow`` is false.
        """
        ray_engines = []
        used_options = set()  # ids of options: an engine and its replacement share the object
        for engine, has_left in zip(engines, left, strict=True):
            if isinstance(engine, RayEngine):
                ray_engines.append(engine)
                if not has_left:
                    used_options.add(id(engine.options))
        free_options = []
        for engine in ray_engines:
            if id(engine.options) not in used_options:
                free_options.append(engine.options)
        available = ray.available_resources().get("GPU", 0.0)
        model_engine = ray_engines[0]
        # Without GPUs engines share the cores, which Ray does not count then.
        cpus = 1 if devices else 0
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": devices}
        if free_options:
            options = free_options[0]
        elif available < devices:
            problem = (
                f"another engine takes {devices} GPUs, and Ray has {available:g} that are free"
            )
            if not may_grow:
                raise UserError(problem)
            limit = f"{model_engine._start_timeout_s:g} s (generator.engine_start_timeout_s)"
            log.warning("%s: it waits for a node, at most %s", problem, limit)
        config = replace(
            model_engine.config, extra={**model_engine.config.extra, "engine_index": len(engines)}
        )
        return RayEngine(model_engine.backend, config, options, model_engine._start_timeout_s)


def _call_of(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(self: RayEngine, *args: object) -> Any:  # noqa: ANN401  (what the engine's method returns)
        return await self._remote(name, *args)

    call.__name__ = name
    call.__doc__ = vars(InferenceEngine)[name].__doc__
    return call


REMOTE = ("heartbeat", "progress", "score", "pause", "resume", "abort", "sleep", "wake", "stats")
for _name in REMOTE:
    setattr(RayEngine, _name, _call_of(_name))
