"""A reward model behind HTTP, as OpenRLHF calls one: ``environment.reward_funcs=[http://host:5000/get_reward]``.

It is sent ``{"query": [text], "prompts": [text], "labels": [label]}`` and answers with one entry per query, or
``{"rewards": [...], "scores": [...], "extra_logs": {...}}``. Several servers of one model are one name with commas;
they take turns, and one that fails is followed by the next.

Invariant: a response is judged by exactly one answer, or the error names the server and what it said.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

TRIES, PAUSE_S, LIMIT_S = 5, 1.0, 180.0  # OpenRLHF's; environment.reward_timeout_s ends them all


def is_remote(name: str) -> bool:
    return name.startswith(("http://", "https://"))


@cache
def remote(name: str) -> Callable[..., Coroutine[Any, Any, object]]:
    """The function that asks the servers of this name."""
    servers = [server.strip() for server in name.split(",")]
    turns = itertools.cycle(range(len(servers)))

    async def remote_reward(queries: list[str], prompts: list[str], labels: list[object]) -> object:
        first = next(turns)
        said = {"query": queries, "prompts": prompts, "labels": labels}
        for number in range(TRIES):
            server = servers[(first + number) % len(servers)]
            try:
                return await _asked(server, said)
            except (TimeoutError, OSError, ValueError) as error:  # aiohttp's are among them
                problem = f"{server}: {error or type(error).__name__}"
            await asyncio.sleep(PAUSE_S if number + 1 < TRIES else 0)
        raise RuntimeError(f"the reward model did not answer in {TRIES} tries; the last: {problem}")

    return remote_reward


async def _asked(server: str, said: dict[str, Any]) -> object:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session,
            session.post(server, json=said) as response,
        ):
            response.raise_for_status()
            return await response.json(content_type=None)
    except aiohttp.ClientError as error:
        raise OSError(str(error) or type(error).__name__) from error
