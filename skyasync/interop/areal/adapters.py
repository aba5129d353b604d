"""AReaL's reward functions and agents.

An agent is a class with ``async def run(self, data, **extra)``. ``run`` gets the row and, if it
takes them, ``base_url``, ``api_key`` and ``http_client`` (one for all episodes of the process, with
httpx installed). It returns the reward, or ``{id of an answer: reward}``.

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
    """``(prompt, completions, prompt_ids, completion_ids, answer)``.

    The function returns a number. ``prompt`` is all the text that the model read, ``completions``
    the response, ``answer`` the row's column, or else its label.
    """

    name = "areal"
    needs_tokens = True

    def matches(self, parameters: Mapping[str, Parameter]) -> bool:
        if "completions" not in parameters or parameters.keys() & {"response", "queries"}:
            return False
        # TRL's functions have completions, too, but no prompt, and as lists.
        return "prompt" in parameters or parameters["completions"].annotation in (str, "str")

    def arguments(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        prompt = inputs.get("prompt")
        prompts = inputs.get("prompts")
        if isinstance(prompts, list):
            prompt = prompts[0]
        return {
            "answer": inputs.get("label"),
            **inputs,
            "prompt": prompt,
            "completions": inputs.get("response"),
        }


def program_of(
    agent_class: Callable[..., object], settings: Mapping[str, object]
) -> Callable[..., object]:
    """The program that plays an episode with the class's one object."""
    agent = agent_class(**accepted(agent_class, settings))
    run: Callable[..., object] = agent.run  # type: ignore[attr-defined]
    client: object = None  # shared by all episodes

    async def program(data: dict[str, object], base_url: str, api_key: str) -> object:
        nonlocal client
        optional: dict[str, object] = {"base_url": base_url, "api_key": api_key}
        if find_spec("httpx") is not None:
            import httpx

            # An agent may close the client: the next episode has a new one.
            if not isinstance(client, httpx.AsyncClient) or client.is_closed:
                # httpx's defaults, 100 connections and 5 s, are too low for all episodes at once.
                limits = httpx.Limits(max_connections=None)
                client = httpx.AsyncClient(timeout=None, limits=limits)
            optional["http_client"] = client
        extra = accepted(run, optional)
        if inspect.iscoroutinefunction(run):
            return await run(data, **extra)
        # In a thread, so that a blocking agent does not stop the other episodes.
        return await asyncio.to_thread(run, data, **extra)

    return program
