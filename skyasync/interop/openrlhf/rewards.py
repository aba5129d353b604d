"""OpenRLHF's reward functions: batches of one query, in a file or over HTTP.

A function takes ``queries`` (all text), ``prompts`` and ``labels``. A server is sent
``{"query": [text], "prompts": [text], "labels": [label]}``:
``environment.reward_funcs=[http://host:5000/get_reward]``. Both answer with one entry per query, or
``{"rewards": [...], "scores": [...], "extra_logs": {...}}``. Several servers of one model are one
name with commas. They take turns, and the next one replaces one that fails. Source:
``examples/python/reward_func.py``.

Invariant: a response has exactly one answer, or the error names the server and its last message.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from inspect import Parameter
from typing import Any

from skyasync.rewards.signature import Signature, single_value

# OpenRLHF's values. environment.reward_timeout_s limits the tries together.
TRIES = 5
PAUSE_S = 1.0  # between two tries
LIMIT_S = 180.0  # for one try


class OpenRLHFSignature(Signature):
    name = "openrlhf"
    needs_tokens = True

    def matches(self, parameters: Mapping[str, Parameter]) -> bool:
        return "queries" in parameters

    def answer(self, returned: object) -> object:
        """``rewards`` is the reward; ``scores`` and the numbers in ``extra_logs`` are metrics."""
        if not isinstance(returned, Mapping):
            return single_value(returned)
        if "rewards" not in returned:
            return returned  # the caller's error names the missing reward
        answer = {"reward": single_value(returned["rewards"])}
        if returned.get("scores") is not None:
            answer["score"] = single_value(returned["scores"])
        logs = returned.get("extra_logs") or {}
        for name, entry in logs.items():
            value = single_value(entry)
            if isinstance(value, int | float):
                answer[str(name)] = value
        return answer


@cache
def remote(name: str) -> Callable[..., Coroutine[Any, Any, object]]:
    """The reward function that sends requests to the servers of this name, in turn."""
    servers = [server.strip() for server in name.split(",")]
    turns = itertools.cycle(range(len(servers)))

    async def remote_reward(queries: list[str], prompts: list[str], labels: list[object]) -> object:
        import aiohttp

        turn = next(turns)
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        request = {"query": queries, "prompts": prompts, "labels": labels}
        for attempt in range(TRIES):
            server = servers[(turn + attempt) % len(servers)]
            try:
                async with (
                    aiohttp.ClientSession(timeout=timeout) as session,
                    session.post(server, json=request) as response,
                ):
                    response.raise_for_status()
                    # The content type is not checked: a server may declare JSON as text.
                    return await response.json(content_type=None)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                problem = f"{server}: {str(error) or type(error).__name__}"
            await asyncio.sleep(PAUSE_S if attempt + 1 < TRIES else 0)
        raise RuntimeError(f"the reward model did not answer in {TRIES} tries; the last: {problem}")

    return remote_reward
