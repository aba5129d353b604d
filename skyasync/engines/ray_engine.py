"""An engine in a Ray actor, spoken to as if it were local.

Invariant: nothing here blocks the caller's event loop; the actor lives from the engine's making to ``shutdown`` and
dies with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray

from skyasync.engines.protocol import (
    ENGINES,
    EngineConfig,
    EngineDiedError,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    PauseMode,
    WakePart,
)
from skyasync.errors import UserError
from skyasync.processes.identity import Identity
from skyasync.weight_sync.update import WeightUpdate

log = logging.getLogger(__name__)

#: The user's terminal shows the run's progress, not that of every library's loading.
QUIET = {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "VLLM_LOGGING_LEVEL": "ERROR"}

#: Calls that an engine's process serves at once: more than there can be. A paused engine answers no request, so if
#: they could take all places, the call that resumes it would find none.
CALLS = 1_000_000

MESSAGE_TOKENS = 2**18  # 3 MB


@contextlib.contextmanager
def _deaths() -> Iterator[None]:
    """Ray has several words for an actor that is no more."""
    try:
        yield
    except ray.exceptions.RayActorError as error:
        raise EngineDiedError(str(error)) from error


class _EngineActor:
    """Forwards to the engine it holds."""

    def __init__(self, backend: str, user_engines: dict[str, Any]) -> None:
        for name, value in QUIET.items():  # before the engine's libraries are imported, here and in its processes
            os.environ.setdefault(name, value)
        ENGINES.update(user_engines)
        self._engine_class = ENGINES.find(backend)
        self._engine: InferenceEngine

    async def start(self, config: EngineConfig) -> Identity:
        self._engine = self._engine_class(config)
        await self._engine.start()
        return Identity.mine()

    async def call(self, method: str, *args: object) -> object:
        return await getattr(self._engine, method)(*args)

    async def progress(self) -> list[GenerationOutput]:
        """Of an engine without the method nothing but that its process lives."""
        return await self._engine.progress() if hasattr(self._engine, "progress") else []

    async def generate(self, requests: list[GenerationRequest]) -> AsyncIterator[list[GenerationOutput]]:
        async for outputs in self._engine.generate(requests):
            for message in messages(outputs):
                yield message


def messages(outputs: Sequence[GenerationOutput]) -> Iterator[list[GenerationOutput]]:
    """The outputs in pieces of about ``MESSAGE_TOKENS``, in order: whoever reads one can do nothing else meanwhile."""
    message: list[GenerationOutput] = []
    tokens = 0
    for output in outputs:
        message.append(output)
        tokens += len(output.token_ids)
        if tokens >= MESSAGE_TOKENS:
            yield message
            message, tokens = [], 0
    if message:
        yield message


class RayEngine:
    """See ``InferenceEngine`` for the methods. Making one starts its process, so Ray must be up.

    Args:
        options: Ray's actor options (resources, placement); an attribute too.
        start_timeout_s: how long the model may take to load.
    """

    def __init__(
        self, backend: str, config: EngineConfig, options: dict[str, Any] | None = None, start_timeout_s: float = 300.0
    ) -> None:
        self.backend, self.config = backend, config
        self._start_timeout_s = start_timeout_s
        self._asked_to_start = False
        self._process: Identity | None = None
        self.options = options or {}
        actor_class = ray.remote(_EngineActor).options(max_concurrency=CALLS, **self.options)
        # Its libraries are imported while the caller does other things.
        self._actor: Any = actor_class.remote(backend, ENGINES.user_parts())

    def set_threads(self, threads: int) -> None:
        """CPU threads of the engine; call before ``start``."""
        self.config = replace(self.config, threads=threads)

    async def start(self) -> None:
        self._asked_to_start = True
        try:
            async with asyncio.timeout(self._start_timeout_s):
                with _deaths():
                    self._process = await self._living.start.remote(self.config)
        except TimeoutError as error:
            raise TimeoutError(
                f"the {self.backend} engine did not start within {self._start_timeout_s:g} s "
                f"(generator.engine_start_timeout_s)"
            ) from error

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[GenerationOutput]]:
        with _deaths():
            async for reference in self._living.generate.options(num_returns="streaming").remote(list(requests)):
                yield await reference

    async def progress(self) -> list[GenerationOutput]:
        with _deaths():
            return await self._living.progress.remote()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._call("score", sequences)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._call("abort", request_ids)

    @property
    def node(self) -> str:
        """Ray's name of the node that it is on; empty before it has started."""
        return self._process.node if self._process is not None else ""

    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None:
        async with update.on(self.node) as own:
            unproven: Sequence[str] | None = await self._call("update_weights", own)
            return unproven

    async def held_version(self) -> int:
        version: int = await self._call("held_version")
        return version

    async def hand_back(self, folder: str) -> str:
        path: str = await self._call("hand_back", folder)
        return path

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self, part: WakePart) -> None:
        await self._call("wake", part)

    async def stats(self) -> EngineStats:
        return await self._call("stats")

    async def _call(self, method: str, *args: object) -> Any:  # noqa: ANN401  (what the engine's method returns)
        with _deaths():
            return await self._living.call.remote(method, *args)

    @property
    def _living(self) -> Any:  # noqa: ANN401  (Ray's handle of the actor)
        """Raises EngineDiedError once it was ended: who asks all engines may have begun before that."""
        if self._actor is None:
            raise EngineDiedError(f"the {self.backend} engine has been ended")
        return self._actor

    async def shutdown(self) -> None:
        """Let the engine release what it holds, then end its process in any case."""
        if self._actor is None:
            return
        actor, self._actor = self._actor, None
        if self._asked_to_start:  # else it holds nothing, and may still be importing
            with contextlib.suppress(Exception):
                async with asyncio.timeout(20):
                    await actor.call.remote("shutdown")
        ray.kill(actor)

    def kill(self) -> None:
        """End its process and all that it started, also if it answers nothing any more. Safe to call twice."""
        if self._actor is not None:
            actor, self._actor = self._actor, None
            ray.kill(actor)
        if self._process is not None:
            self._process.end()

    def successor(self) -> RayEngine:
        """Another one in its place: the same placement, the same configuration. Its process starts."""
        return RayEngine(self.backend, self.config, self.options, self._start_timeout_s)

    @property
    def ended(self) -> bool:
        """Its place is free."""
        return self._actor is None


def another(engines: Sequence[InferenceEngine], devices: int, *, may_grow: bool = False) -> RayEngine:
    """One more like these, in the place of one that has left, or where Ray has room. Asks Ray, and waits for it.

    Args:
        devices: GPUs of an engine; 0 without GPUs, where engines share the cores.
        may_grow: where Ray has no room it is asked all the same, and has until the engine's start is late: a node may
            come (Ray's autoscaler brings one for what is asked for).

    Raises:
        UserError: if Ray has not so many, and will not have.
    """
    ours = [engine for engine in engines if isinstance(engine, RayEngine)]
    taken = [id(engine.options) for engine in ours if not engine.ended]
    free = [engine.options for engine in ours if id(engine.options) not in taken]
    options: dict[str, Any] = free[0] if free else {"num_cpus": 1 if devices else 0, "num_gpus": devices}
    there = ray.available_resources().get("GPU", 0.0)
    first = ours[0]
    if not free and there < devices:
        lacking = f"another engine takes {devices} GPUs, and Ray has {there:g} that are free"
        if not may_grow:
            raise UserError(lacking)
        log.warning("%s: it waits for a node, at most %g s (generator.engine_start_timeout_s)",
                    lacking, first._start_timeout_s)  # fmt: skip
    config = replace(first.config, extra={**first.config.extra, "engine_index": len(engines)})
    return RayEngine(first.backend, config, options, first._start_timeout_s)
