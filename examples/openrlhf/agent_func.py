"""Sorting with a second try, as an OpenRLHF agent.

The file runs in OpenRLHF, and in skyasync with ``generator.agent_func_path``.
"""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TRIES = 2
END = "<|im_end|>"


class AgentInstance(AgentInstanceBase):
    """Reward 1 for the right answer, 0.5 for the right answer at the second attempt."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tries = 0
        self.question = ""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, str]:
        self.question = states["observation"]
        return {"observation": self.question}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.tries += 1
        action = states["action_text"]
        right = action.removesuffix(END).strip() == states["label"]
        reward = torch.tensor(float(right) / self.tries)
        feedback = f"\n{self.question}"
        if not action.endswith(END):  # it was cut off: the message needs its end
            feedback = END + feedback
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": feedback,
            "done": right or self.tries == TRIES,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"right": torch.tensor(float(right)), "tries": torch.tensor(self.tries)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(AgentInstance)
