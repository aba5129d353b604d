"""The environment pool on Ray actors."""

from __future__ import annotations

from typing import Any

import ray

from skyasync.envs.pool import EnvPool, EnvWorker, WorkerCall


def ray_pool(
    env_config: dict[str, Any], workers: int, step_timeout_s: float, options: dict[str, Any] | None = None
) -> EnvPool:
    """A pool of ``workers`` actors; they die with the process that made them."""
    actor_class = ray.remote(EnvWorker).options(num_cpus=0, **(options or {}))
    actors = [actor_class.remote(env_config) for _ in range(workers)]

    def caller(actor: Any) -> WorkerCall:
        async def call(method: str, *args: Any) -> Any:
            return await getattr(actor, method).remote(*args)

        return call

    return EnvPool([caller(actor) for actor in actors], step_timeout_s)
