"""AReaL: settings, recipes, reward functions, agents, and the names that these import.

``from skyasync.interop.areal import AsyncRewardWrapper``: each name does what it does there, without processes of its
own. Sources: ``areal/api/reward_api.py``, ``areal/api/workflow_api.py``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from skyasync.interop.system import System

__all__ = ["SYSTEM", "AgentWorkflow", "AsyncRewardWrapper"]

Foreign = Any  # of the user's classes

SYSTEM = System(
    "areal",
    "AReaL",
    order=4,
    adapters={"reward_signature": "adapters:ArealSignature", "agent_class": "adapters:program_of"},
)


class AgentWorkflow:
    """An agent: subclass it, or any class, and define ``async def run(self, data, **extra)``."""

    async def run(self, data: dict[str, Foreign], **extra_kwargs: Foreign) -> float | dict[str, float]:
        raise NotImplementedError(f"{type(self).__name__} must define run(data, **extra)")


class AsyncRewardWrapper:
    """A reward function that can be awaited; one that is not ``async`` runs in a thread.

    Args:
        timeout_seconds: what takes longer is worth 0, as there.
    """

    def __init__(self, reward_fn: Callable[..., Foreign], timeout_seconds: float = 15.0, **more: object) -> None:
        self.reward_fn, self.timeout_seconds = reward_fn, timeout_seconds

    async def __call__(self, *args: Foreign, **kwargs: Foreign) -> Foreign:
        asynchronous = inspect.iscoroutinefunction(self.reward_fn)
        call = self.reward_fn(*args, **kwargs) if asynchronous else asyncio.to_thread(self.reward_fn, *args, **kwargs)
        try:
            return await asyncio.wait_for(call, self.timeout_seconds)
        except TimeoutError:
            return 0.0
