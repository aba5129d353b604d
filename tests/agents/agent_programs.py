"""Agent programs for tests: correct ones, and every way to be wrong."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from openai import AsyncOpenAI, AuthenticationError, OpenAI

ASYNC_SLEEP_S = 600.0
released = threading.Event()  # ends the hanging threads
calls: list[str] = []  # of ``shaky``
refused = threading.Event()  # a hung program has called again, without an answer


async def length(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """One call; the reward is the length of the reply. A row may have it fail in the way that ``fails`` names."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        failure = data.get("fails")
        if failure == "no call":
            return 1.0
        reply = await client.chat.completions.create(model="policy", messages=data["prompt"])
        if failure == "raises":
            raise LookupError("broken")
        if failure == "exits":
            raise SystemExit(3)
        if failure == "hangs":
            await asyncio.sleep(ASYNC_SLEEP_S)
        if failure == "crashes":
            os._exit(1)
        if failure == "crashes once" and first_time(data["mark"]):
            os._exit(1)
        wrong = {
            "nan": float("nan"),
            "none": None,
            "text": "1.0",
            "bool": True,
            "key": {"score": 1.0},
        }
        wrong["metric"] = {"reward": 1.0, "metrics": {"x": float("inf")}}
        return (
            wrong[failure]
            if failure in wrong
            else float(len(reply.choices[0].message.content or ""))
        )


async def shaky(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """``length``, whose first ``fails`` attempts end in a temporary error."""
    from skyasync import TransientError

    score = await length({**data, "fails": ""}, base_url, api_key)
    calls.append(data["mark"])
    if calls.count(data["mark"]) <= data["fails"]:
        raise TransientError("busy")
    return score


def first_time(mark: str) -> bool:
    """Whether this file did not exist yet; it exists afterwards."""
    try:
        open(mark, "x").close()
    except FileExistsError:
        return False
    return True


def in_a_thread(
    data: dict[str, Any], base_url: str, api_key: str, **further: Any
) -> dict[str, Any]:
    """Two calls of one conversation, without async; reports its further arguments."""
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = list(data["prompt"])
        for _ in range(2):
            try:
                reply = client.chat.completions.create(model="policy", messages=messages)
            except AuthenticationError:
                refused.set()
                raise
            messages += [reply.choices[0].message, {"role": "user", "content": "and?"}]
            if data.get("fails") == "hangs":
                released.wait(60)
    config = further["config"]
    return {"reward": config.get("reward", 0.5), "metrics": {"eval": float(further["is_eval"])}}


async def by_call(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """A conversation of three calls, and a separate call, each with its reward of the row's ``rewards``, if any."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages, said = list(data["prompt"]), []
        for _ in range(3):
            said.append(await client.chat.completions.create(model="policy", messages=messages))
            messages += [said[-1].choices[0].message, {"role": "user", "content": "and?"}]
        helper = [{"role": "system", "content": "Help."}, *data["prompt"]]
        said.append(await client.chat.completions.create(model="policy", messages=helper))
    return {
        answer.id: reward
        for answer, reward in zip(said, data["rewards"], strict=True)
        if reward is not None
    }


async def two_agents(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """A sub-agent with a prompt of its own."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        helper = [{"role": "system", "content": "Help."}, *data["prompt"]]
        await client.chat.completions.create(model="policy", messages=helper)
        await client.chat.completions.create(model="policy", messages=data["prompt"])
    return 1.0


def no_program(data: dict[str, Any]) -> float:
    return 0.0
