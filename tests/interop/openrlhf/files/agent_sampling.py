"""An instance with another name, without ``reset``, that shortens the second answer by its sampling parameters."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Short(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.lengths = []

    async def step(self, states, **kwargs):
        self.lengths.append(len(states["action_text"].encode()))
        params = states["sampling_params"]
        params.max_tokens, params.temperature = 2, 0.5
        done = len(self.lengths) == 2
        return {
            "rewards": torch.tensor([float(self.lengths[-1] % 2)]),
            "environment_feedback": "..." if not done else "",
            "done": done,
            "sampling_params": params,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Short)
