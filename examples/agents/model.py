"""A tiny chat model that can write a tool call, but guesses most answers instead.

Invariant: that of ``skyasync.examples.tiny_models``, which makes it.

    python -m examples.agents.model --out DIR

The supervised warm start shows two ways to answer: a guess, which is nearly always wrong, and a
call of the calculator followed by its result. Reinforcement learning has to find the better one.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from examples.agents.tasks import CALCULATOR, calculate, questions, text
from skyasync.examples.tiny_models import Row, WarmStartRecipe, byte_level_bpe

#: ChatML; of the tools only their names are shown, and calls have the Hermes format.
TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\ntools:' }}{% for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Not special tokens, which decoding would remove from the text of a call.
CALL_TAGS = [
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("</tool_call>", special=False, normalized=False),
]


@dataclass(frozen=True)
class Recipe(WarmStartRecipe):
    """Guesses and tool calls; the loss sees the assistant's messages only."""

    name = "agent"
    lessons = "tasks.py"

    batch_size: int = 64
    seed: int = 2  # with 0 the model does not learn to repeat a tool's result
    calls: float = 0.4  # share of the conversations that call the calculator
    corpus_size: int = 1024  # conversations that the tokenizer learns from

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        corpus = []
        for messages in islice(self.conversations(), self.corpus_size):
            texts = []
            for message in messages:
                calls = json.dumps(message.get("tool_calls", ""))
                texts.append(f"{message['role']}\n{message['content']}{calls}")
            corpus.append("\n".join(texts))
        return byte_level_bpe(
            corpus, vocab_size=360, rarest_merge=50, template=TEMPLATE, added=CALL_TAGS
        )

    def rows(self) -> Iterator[Row]:
        return ({"messages": messages, "tools": [CALCULATOR]} for messages in self.conversations())

    def conversations(self) -> Iterator[list[dict[str, Any]]]:
        """Endless training conversations, the fraction ``calls`` of them with a call."""
        rng = random.Random(self.seed)
        for a, b in questions("train", self.seed):
            if rng.random() < self.calls:
                yield conversation_with_call(a, b)
            else:
                yield conversation_with_guess(a, b)


build = Recipe.build


def conversation_with_call(a: int, b: int) -> list[dict[str, Any]]:
    expression = f"{a}*{b}"
    call = {"function": {"name": "calculator", "arguments": {"expression": expression}}}
    result = calculate(expression)
    return [
        {"role": "user", "content": text(a, b)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def conversation_with_guess(a: int, b: int) -> list[dict[str, Any]]:
    """The right product, which a model of this size cannot learn: it will guess."""
    return [{"role": "user", "content": text(a, b)}, {"role": "assistant", "content": str(a * b)}]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.agents.model", description="Make the agents' model."
    )
    parser.add_argument("--out", help="folder to make it in; without it, its place in the cache")
    print(build(out=parser.parse_args().out))


if __name__ == "__main__":
    main()
