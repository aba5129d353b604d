"""The same agent as an environment: a question, a tool, and a reward.

uv run -m skyasync --config examples/agents/config.yaml --config examples/agents/env.yaml
"""

from __future__ import annotations

from typing import Any

from examples.agents.tasks import calculate
from skyasync.envs import BaseTextEnv, tool


class CalculatorEnv(BaseTextEnv):
    """The model may call the calculator. A reply without a call is its answer: the episode ends."""

    @tool
    def calculator(self, expression: str) -> str:
        """The product of two whole numbers.

        Args:
            expression: for example 12*34
        """
        return calculate(expression)

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        answer, results = self.call_tools(action)
        if results:
            return {"observations": results, "reward": 0.0, "done": False, "metadata": {}}
        reward = float(answer.strip() == self.extras["answer"])
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}

    def get_metrics(self) -> dict[str, float]:
        return {"tool_used": float(self.turns > 1)}
