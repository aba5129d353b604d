"""A tiny chat model that knows the form of a tool call, but rarely makes one: it would rather
guess.

Invariant: that of ``skyasync.examples.tiny_models``, which makes it.

    python -m examples.agents.model --out DIR

The supervised warm start shows two ways to answer: a guess, which is nearly always wrong, and a
call of the calculator followed by its result. Reinforcement learning has to find out which one
pays.
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
#: Not special tokens: decoding must keep the text of a call.
CALL_TAGS = [
    AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")
]


@dataclass(frozen=True)
class Recipe(WarmStartRecipe):
    """Guesses and tool calls; the loss sees the assistant's messages only."""

    name = "agent"
    lessons = "tasks.py"

    batch_size: int = 64
    seed: int = 2  # with 0 the model does not learn to repeat a tool's result
    calls: float = 0.4  # share of the conversations that call the calculator
    corpus_size: int = 1024  # conversations the tokenizer learns from

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        corpus = (
            "\n".join(
                f"{m['role']}\n{m['content']}{json.dumps(m.get('tool_calls', ''))}"
                for m in messages
            )
            for messages in islice(self.conversations(), self.corpus_size)
        )
        return byte_level_bpe(
            corpus, vocab_size=360, rarest_merge=50, template=TEMPLATE, added=CALL_TAGS
        )

    def rows(self) -> Iterator[Row]:
        return ({"messages": messages, "tools": [CALCULATOR]} for messages in self.conversations())

    def conversations(self) -> Iterator[list[dict[str, Any]]]:
        """Endless training conversations, ``calls`` of them with a call."""
        rng = random.Random(self.seed)
        for a, b in questions("train", self.seed):
            yield called(a, b) if rng.random() < self.calls else guessed(a, b)


build = Recipe.build


def called(a: int, b: int) -> list[dict[str, Any]]:
    call = {"function": {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}}
    result = calculate(f"{a}*{b}")
    return [
        {"role": "user", "content": text(a, b)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def guessed(a: int, b: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text(a, b)}, {"role": "assistant", "content": str(a * b)}]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.agents.model", description="Make the agents' model."
    )
    parser.add_argument("--out", help="folder to make it in; without it, its place in the cache")
    print(build(out=parser.parse_args().out))


if __name__ == "__main__":
    main()
