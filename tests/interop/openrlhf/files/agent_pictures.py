"""An agent with images."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def step(self, states, **kwargs):
        return {
            "rewards": torch.tensor(0.0),
            "environment_feedback": "look: <image>",
            "environment_images": [[[0, 0, 0]]],
            "done": False,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
