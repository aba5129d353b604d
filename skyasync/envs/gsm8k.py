"""GSM8K: one turn, reward 1 for the right final number after ``####``."""

from __future__ import annotations

import re

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.registry import ENVS
from skyasync.errors import UserError

FINAL_NUMBER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")


def final_number(text: str) -> str | None:
    """The last number that follows ``####``, without thousands separators; None if there is none."""
    found = FINAL_NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


@ENVS.register("gsm8k")
class GSM8kEnv(BaseTextEnv):
    """Expects ``reward_spec = {"ground_truth": "72"}`` (or ``answer``) among the row's columns.

    Raises:
        UserError: if neither is there: every answer would be wrong.
    """

    def step(self, action: str) -> BaseTextEnvStepOutput:
        truth = (self.extras.get("reward_spec") or {}).get("ground_truth", self.extras.get("answer"))
        if truth is None:
            raise UserError(f"gsm8k needs reward_spec.ground_truth or answer; the row has: {', '.join(self.extras)}")
        right = final_number(action) == str(truth).replace(",", "")
        return {"observations": [], "reward": float(right), "done": True, "metadata": {}}
