"""One-digit addition for a small pretrained model, which solves about one question in five.

Invariant: training and held-out questions have no pair of digits in common: the 100 pairs are
shuffled once with a fixed seed and split, and only then put into words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

HELD_OUT_PAIRS = 25
ENV_CLASS = "examples.smollm2.env:LastNumberEnv"
WORDINGS = (
    "What is {a} + {b}? Reply with only the number.",
    "What is {a} plus {b}? Reply with only the number.",
)


def train_prompts() -> list[dict[str, Any]]:
    """Both wordings of the 75 pairs that are not held out."""
    return _rows(_shuffled_pairs()[HELD_OUT_PAIRS:])


def val_prompts() -> list[dict[str, Any]]:
    """Both wordings of the held-out pairs."""
    return _rows(_shuffled_pairs()[:HELD_OUT_PAIRS])


def _shuffled_pairs() -> list[tuple[int, int]]:
    pairs = list(product(range(10), range(10)))
    random.Random(0).shuffle(pairs)
    return pairs


def _rows(pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    rows = []
    for a, b in pairs:
        for wording in WORDINGS:
            question = wording.format(a=a, b=b)
            rows.append(
                {
                    "prompt": [{"role": "user", "content": question}],
                    "env_class": ENV_CLASS,
                    "answer": str(a + b),
                }
            )
    return rows
