"""The current interface: an instance per episode, and an executor that plays it turn by turn."""

from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

LOADS = []  # of this file in this process
LOADS.append(1)


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.tries = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"] + "Think. "}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        self.tries += 1
        assert "Think. " in states["observation_text"]
        done = self.tries == 2
        reward = torch.tensor(float(sum(map(ord, states["action_text"])) % 2))
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if done else " No. ",
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"tries": torch.tensor(self.tries), "loads": len(LOADS)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
