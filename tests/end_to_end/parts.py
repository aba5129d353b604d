"""Components of the runs under test, importable by every process of a run."""

from __future__ import annotations

from typing import Any

from skyasync import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.examples.tiny.tasks import prompts
from skyasync.examples.vision.discs import rows

DATASET_SIZE = 16  # two batches: most runs cross the end of an epoch


class Sevens(BaseTextEnv):
    """Rewards the share of sevens among seven characters: different in every group, and learned in a few steps."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return {
            "observations": [],
            "reward": action[:7].count("7") / 7,
            "done": True,
            "metadata": {},
        }


class Distinct(BaseTextEnv):
    """Rewards distinct characters: rewards differ in every batch, also of an engine whose samples no seed repeats."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return {"observations": [], "reward": len(set(action)) / 8, "done": True, "metadata": {}}


def train_prompts() -> list[dict[str, Any]]:
    return [{**row, "env_class": ""} for row in prompts("train", count=DATASET_SIZE, seed=1)]


def val_prompts() -> list[dict[str, Any]]:
    return [{**row, "env_class": ""} for row in prompts("held_out", count=32, seed=2)]


async def sevens(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """``Sevens`` as an agent program."""
    from openai import AsyncOpenAI

    from examples.agents.calculator import connections

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    reply = await client.chat.completions.create(model="policy", messages=data["prompt"])
    return (reply.choices[0].message.content or "")[:7].count("7") / 7


async def branching(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Three turns, each requested three times; the last answer is continued."""
    from openai import AsyncOpenAI

    from examples.agents.calculator import connections

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    messages, sevens = list(data["prompt"]), 0
    for _ in range(3):
        for _ in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            sevens += (reply.choices[0].message.content or "").count("7")
        messages += [reply.choices[0].message, {"role": "user", "content": "again"}]
    return float(sevens)


def disc_prompts() -> list[dict[str, Any]]:
    return rows(0, DATASET_SIZE)
