"""The interface of 2025: the executor gets its parts, and its ``execute`` only forwards."""

import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.step_idx += 1
        reward = torch.tensor(float(sum(map(ord, states["action_text"])) % 2))
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "\n\nHuman: again\n\nAssistant: ",
            "done": self.step_idx == 2,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"steps": torch.tensor(self.step_idx)},
        }


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(
            AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue
        )

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
