"""The reward of one-digit addition: 1 if the last number in the response is the sum, else 0."""

from __future__ import annotations

import re

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput

NUMBER = re.compile(r"\d+")


class LastNumberEnv(BaseTextEnv):
    """One turn. "4 + 9 = 13" counts as well as "13": the model rarely replies with the number."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        numbers = NUMBER.findall(action)
        reward = 0.0
        if numbers and numbers[-1] == self.extras["answer"]:
            reward = 1.0
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
