"""An agent with OpenAI's own client: it calls the model, runs the calculator if it is called, and
checks the answer.

    uv run --extra openai -m skyasync --config examples/agents/config.yaml

The program does not know of training: with another base URL and key it runs against any server.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from examples.agents.tasks import CALCULATOR, calculate

MOST_TURNS = 3


@cache
def connections() -> DefaultAsyncHttpxClient:
    """Shared by all episodes of a process: making a client for each takes longer than an
    episode."""
    return DefaultAsyncHttpxClient()


async def run_agent(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Play one question; the reward is 1 if the last reply is the answer."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    messages = list(data["prompt"])
    for turn in range(MOST_TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR]
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            score = float((message.content or "").strip() == data["answer"])
            return {"reward": score, "metrics": {"tool_used": float(turn > 0)}}
        messages.append(message)
        for call in message.tool_calls:
            result = calculate(json.loads(call.function.arguments).get("expression"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"reward": 0.0, "metrics": {"tool_used": 1.0}}
