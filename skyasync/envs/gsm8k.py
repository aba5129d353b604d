"""GSM8K: one turn, reward 1 for the right final number after ``####``."""

from __future__ import annotations

from typing import Any

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.registry import ENVS
from skyasync.envs.reward import right_answer
from skyasync.errors import UserError
from skyasync.rewards.text import final_number, gsm8k

__all__ = ["GSM8kEnv", "final_number"]


@ENVS.register("gsm8k")
class GSM8kEnv(BaseTextEnv):
    """Expects ``reward_spec = {"ground_truth": "72"}`` (or ``answer``, or ``label``) among the row's columns.

    Raises:
        UserError: if none of them is there: every answer would be wrong.
    """

    @classmethod
    def instant(cls, env_config: dict[str, Any], extras: dict[str, Any]) -> bool:
        return True

    def step(self, action: str) -> BaseTextEnvStepOutput:
        truth = right_answer(self.extras)
        if truth is None:
            raise UserError(f"gsm8k needs reward_spec.ground_truth or answer; the row has: {', '.join(self.extras)}")
        return {"observations": [], "reward": gsm8k(action, truth), "done": True, "metadata": {}}
