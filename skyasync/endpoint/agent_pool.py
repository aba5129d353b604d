"""Agent programs in processes of their own.

Invariant: an episode ends with its score or with an error that is its own: the program's, its time limit's, or that of
its process, which is then replaced. A process that cannot end an episode any more is killed; what else it was playing
is told so (``ProcessLostError``) and may be played again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from skyasync.endpoint.agent_process import AgentError, AgentProcess, NonFiniteAgentError, PassingAgentError, Score
from skyasync.utils.retry import RetryPolicy
from skyasync.utils.rpc import CLOSE_S, HEARTBEAT_S, ProcessLostError, RpcClient, RpcPool, RpcTransport, key_of

__all__ = [
    "AgentError",
    "AgentPool",
    "NonFiniteAgentError",
    "PassingAgentError",
    "ProcessLostError",
    "Score",
    "ray_processes",
]


class AgentPool:
    """Spreads episodes over processes.

    Args:
        start: makes a process with an ``AgentProcess``; called again for each one that must be replaced.
        count: how many there are.
    """

    def __init__(self, start: Callable[[], RpcTransport], count: int = 1) -> None:
        self.pool = RpcPool(start, count, "the agent program", HEARTBEAT_S + CLOSE_S)

    async def play(self, episode: str, data: dict[str, Any], base_url: str, api_key: str, *, is_eval: bool = False,
                   timeout_s: float = 0.0) -> Score:  # fmt: skip
        """Run the program on one row; ``timeout_s=0`` is no limit.

        Raises:
            UserError: if the program cannot be loaded.
            AgentError: if it raises, takes too long, or returns no score.
            ProcessLostError: if its process dies.
        """
        link, key = self.pool.take(episode), key_of(episode)
        try:
            await link.load("program")
            async with asyncio.timeout(timeout_s or None):
                score: Score = await link.post("play", key, data, base_url, api_key, is_eval)
                return score
        except TimeoutError:
            _end(link, key)
            problem = f"the program did not end within {timeout_s:g} s (generator.episode_timeout_s)"
            raise AgentError(f"{episode}: {problem}") from None
        except asyncio.CancelledError:
            _end(link, key)
            raise
        finally:
            self.pool.give_back(link, episode)

    async def close(self) -> None:
        """Kill all processes."""
        self.pool.close()


def _end(link: RpcClient, key: str) -> None:
    """Have an episode cancelled without waiting for it, in a process that can still do so."""
    link.post("close", key).add_done_callback(
        lambda ended: link.kill() if not ended.cancelled() and ended.exception() else None
    )


def ray_processes(
    program: str,
    config: dict[str, Any],
    kept: list[str],
    host: str,
    patience: RetryPolicy = RetryPolicy(),  # noqa: B008  (frozen)
) -> Callable[[], RpcTransport]:
    """Starts an ``AgentProcess`` in a Ray actor: on this machine if the endpoint's ``host`` is its loopback."""

    def start() -> RpcTransport:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from skyasync.utils.rpc import RayTransport

        options: dict[str, Any] = {}
        if host.startswith("127.") or host in ("localhost", "::1"):
            node = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return RayTransport(partial(AgentProcess, program, config, kept, patience), 0.0, options=options)

    return start
