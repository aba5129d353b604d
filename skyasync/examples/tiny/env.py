"""The environment of the tiny tasks: reward 1 for exactly the right answer, 0 for anything else."""

from __future__ import annotations

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput


class TinyEnv(BaseTextEnv):
    """One turn; only ``extras["answer"]`` earns the reward (spaces and newlines around it do not matter)."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(action.strip() == self.extras["answer"])
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
