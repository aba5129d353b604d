"""One-digit addition for a small pretrained model, which answers about one question in five rightly.

Invariant: training and held-out questions are disjoint. The 200 questions (100 sums of two digits, in words or in
figures) are shuffled once with a fixed seed and cut in two.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

HELD_OUT = 60
ENV_CLASS = "examples.tiny.env:TinyEnv"  # exactly the answer, nothing else
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def train_prompts() -> list[dict[str, Any]]:
    """All questions but the held-out ones."""
    return _shuffled()[HELD_OUT:]


def val_prompts() -> list[dict[str, Any]]:
    """The first ``HELD_OUT`` of the shuffled questions."""
    return _shuffled()[:HELD_OUT]


def _shuffled() -> list[dict[str, Any]]:
    rows = []
    for a, b in product(range(10), repeat=2):
        for text in (f"{a} + {b}", f"{WORDS[a]} plus {WORDS[b]}"):
            content = f"What is {text}? Reply with only the number."
            rows.append(
                {"prompt": [{"role": "user", "content": content}], "env_class": ENV_CLASS, "answer": str(a + b)}
            )
    random.Random(0).shuffle(rows)
    return rows
