"""AReaL's reward functions, and agents that are classes with
``async def run(self, data, **extra)``.

``run`` is given the row and, if it takes them, ``base_url``, ``api_key`` and ``http_client`` (one
for all episodes of the process, with httpx installed); it returns the reward, or
``{id of an answer: reward}``.

Invariant: one object per process, made with those settings that its class takes. Source:
``areal/api/reward_api.py``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from inspect import Parameter
from typing import Any

from skyasync.registry import accepted
from skyasync.rewards.signature import Signature


class ArealSignature(Signature):
    """``(prompt, completions, prompt_ids, completion_ids, answer)`` give a number.

    ``prompt`` is all that the model read, ``completions`` the response, ``answer`` the row's
    column, or else its label.
    """

    name = "areal"
    needs_tokens = True

    def matches(self, parameters: Mapping[str, Parameter]) -> bool:
        if "completions" not in parameters or parameters.keys() & {"response", "queries"}:
            return False
        return "prompt" in parameters or parameters["completions"].annotation in (str, "str")

    def arguments(self, known: Mapping[str, Any]) -> Mapping[str, Any]:
        prompts = known.get("prompts")
        if isinstance(prompts, list):
            prompt = prompts[0]
        else:
            prompt = known.get("prompt")
        return {
            "answer": known.get("label"),
            **known,
            "prompt": prompt,
            "completions": known.get("response"),
        }


def program_of(
    agent_class: Callable[..., object], settings: Mapping[str, object]
) -> Callable[..., object]:
    """The program that plays an episode with the class's one object."""
    agent = agent_class(**accepted(agent_class, settings))
    run: Callable[..., object] = agent.run  # type: ignore[attr-defined]
    client: object = None  # of all episodes; an agent may close it

    async def program(data: dict[str, object], base_url: str, api_key: str) -> object:
        nonlocal client
        offered: dict[str, object] = {"base_url": base_url, "api_key": api_key}
        if find_spec("httpx") is not None:
            import httpx

            if not isinstance(client, httpx.AsyncClient) or client.is_closed:
                client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
            offered["http_client"] = client
        extra = accepted(run, offered)
        if inspect.iscoroutinefunction(run):
            return await run(data, **extra)
        return await asyncio.to_thread(run, data, **extra)

    return program
