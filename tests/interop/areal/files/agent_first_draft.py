"""A class with only run(data) and two independent calls, one of which it rewards."""

import os  # noqa: F401  (as such files have it)

from openai import OpenAI


class Drafts:
    def run(self, data, base_url, api_key):
        with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            answers = [
                client.chat.completions.create(
                    model="default",
                    messages=[*data["messages"], {"role": "user", "content": style}],
                )
                for style in ("short", "long")
            ]
        return {answers[0].id: float(len(answers[0].choices[0].message.content or "") % 2)}
