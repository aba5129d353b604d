"""Several calls, each with a reward by the id of its answer."""

from openai import AsyncOpenAI


class TurnsAgent:
    def __init__(self, max_turns: int = 8, temperature: float = 1.0):
        self.max_turns, self.temperature = max_turns, temperature

    async def run(self, data: dict, **extra_kwargs):
        messages, rewards = data["messages"].copy(), {}
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"], max_retries=0
        )
        for turn in range(self.max_turns):
            response = await client.chat.completions.create(
                messages=messages,
                model="default",
                temperature=self.temperature,
                max_completion_tokens=4,
            )
            message = response.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            rewards[response.id] = float(turn + 1)
            messages.append({"role": "user", "content": "again"})
        await client.close()
        return rewards
