"""The environment pool on Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from skyasync.envs.episodes import Answer, Call
from skyasync.envs.pool import EnvPool
from skyasync.envs.registry import EnvFactory
from skyasync.envs.worker import EnvWorker, WorkerSettings


class RayWorker:
    """An ``EnvWorker`` in an actor; it dies with the process that made it."""

    def __init__(self, settings: WorkerSettings, options: dict[str, Any]) -> None:
        self._actor: Any = ray.remote(EnvWorker).options(num_cpus=0, **options).remote(settings)

    async def define(self, name: str, factory: EnvFactory) -> None:
        await self._actor.define.remote(name, factory)

    async def exchange(self, calls: Sequence[Call]) -> tuple[list[Answer], int]:
        answers, hung = await self._actor.exchange_tuples.remote([tuple(call) for call in calls])
        return [Answer(*answer) for answer in answers], hung

    def kill(self) -> None:
        ray.kill(self._actor)


def ray_pool(settings: WorkerSettings, workers: int, options: dict[str, Any] | None = None) -> EnvPool:
    """A pool of ``workers`` actors, ``options`` being Ray's for each."""
    return EnvPool(lambda: RayWorker(settings, options or {}), workers, settings.step_timeout_s)
