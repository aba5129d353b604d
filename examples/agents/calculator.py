"""An agent with OpenAI's client: it calls the model, runs the calculator, and checks the answer.

    uv run --extra openai -m skyasync --config examples/agents/config.yaml

The program has no code for training: with another base URL and key it runs against any server.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from examples.agents.tasks import CALCULATOR, calculate

MOST_TURNS = 3  # a call of the calculator, the answer, and one to spare


@cache  # for all episodes of a process: making a client takes longer than an episode
def connections() -> DefaultAsyncHttpxClient:
    return DefaultAsyncHttpxClient()


async def run_agent(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Play one question; the reward is 1 if the last reply is the answer.

    Args:
        data: the row of the data set: ``prompt``, ``answer``.
        base_url: of the run's endpoint.
        api_key: of this episode, by which the endpoint knows it.
    """
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    messages = list(data["prompt"])
    for turn in range(MOST_TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR]
        )
        message = reply.choices[0].message
        if not message.tool_calls:  # the answer
            answer = (message.content or "").strip()
            reward = float(answer == data["answer"])
            return {"reward": reward, "metrics": {"tool_used": float(turn > 0)}}
        messages.append(message)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = calculate(arguments.get("expression"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"reward": 0.0, "metrics": {"tool_used": 1.0}}  # too many calls
