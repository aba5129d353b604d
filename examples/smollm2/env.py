"""The reward of one-digit addition: 1 if the last number in the response is the sum, otherwise
0."""

from __future__ import annotations

import re

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput

NUMBER = re.compile(r"\d+")


class LastNumberEnv(BaseTextEnv):
    """One turn. The small model rarely replies with the number alone, so "4 + 9 = 13" counts as
    well as "13"."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        numbers = NUMBER.findall(action)
        reward = float(bool(numbers) and numbers[-1] == self.extras["answer"])
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
