"""A single call through OpenAI's client, rewarded by a function."""

import os

from openai import AsyncOpenAI


def parity(completions: str, answer: str) -> float:
    return float((len(completions) + int(answer)) % 2)


class MathAgent:
    def __init__(self, **kwargs):
        self.kwargs = kwargs.copy()
        self.kwargs.pop("max_turns", None)

    async def run(self, data: dict, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
            api_key=extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        completion = await client.chat.completions.create(
            messages=data["messages"], model="default", **self.kwargs
        )
        return parity(completions=completion.choices[0].message.content, answer=data["answer"])
