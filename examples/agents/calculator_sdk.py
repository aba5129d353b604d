"""The same agent in a framework, OpenAI's Agents SDK, whose client calls the run's endpoint.

uv run --extra openai-agents -m skyasync --config examples/agents/config.yaml \
    generator.agent_program=examples.agents.calculator_sdk:run_agent
"""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from examples.agents.calculator import MOST_TURNS, connections
from examples.agents.tasks import calculate

set_tracing_disabled(True)  # otherwise it would send traces to OpenAI's servers


@function_tool
def calculator(expression: str) -> str:
    """The product of two whole numbers."""
    return calculate(expression)


async def run_agent(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play one question; the reward is 1 if the last reply is the answer."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="calculator", tools=[calculator], model=model)
    try:
        result = await Runner.run(
            agent, data["prompt"], max_turns=MOST_TURNS, run_config=RunConfig()
        )
    except (MaxTurnsExceeded, ModelBehaviorError):  # too many calls, or a call of an unknown tool
        return 0.0
    return float(str(result.final_output).strip() == data["answer"])
