"""A host in a Ray actor; it dies with the process that made it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import cloudpickle

from skyasync.processes.calls import Answer, Call, Service
from skyasync.processes.host import Host
from skyasync.processes.identity import Identity


class _Host(Host):
    async def who(self) -> Identity:
        return Identity.mine()

    async def load_pickled(self, args: bytes) -> Exception | None:
        """What is to be loaded may be a class of the user's: its module is imported where that may take its time."""
        return await self._loaded(lambda: self._service.load(*cloudpickle.loads(args)))

    async def exchange_tuples(self, calls: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], int]:
        """``exchange`` in plain tuples, which take a third of the time to travel."""
        answers, hung = await self.exchange([Call(*call) for call in calls])
        return [tuple(answer) for answer in answers], hung


class RayHost:
    """``make``, ``limit_s`` and ``max_threads`` are ``Host``'s, ``options`` Ray's for the actor."""

    def __init__(
        self, make: Callable[[], Service], limit_s: float, max_threads: int = 512, options: dict[str, Any] | None = None
    ) -> None:
        actor: Any = ray.remote(_Host).options(num_cpus=0, **(options or {}))
        self._actor = actor.remote(make, limit_s, max_threads)
        self._process: Identity | None = None

    async def load(self, *args: object) -> Exception | None:
        if self._process is None:
            self._process = await self._actor.who.remote()
        error: Exception | None = await self._actor.load_pickled.remote(cloudpickle.dumps(args))
        return error

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        answers, hung = await self._actor.exchange_tuples.remote([tuple(call) for call in calls])
        return [Answer(*answer) for answer in answers], hung

    def end(self) -> None:
        self._actor.__ray_terminate__.remote()  # of a death Ray would tell the user

    def kill(self) -> None:
        """Also if it answers nothing any more."""
        ray.kill(self._actor)
        if self._process is not None:
            self._process.end()
