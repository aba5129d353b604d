"""Products of two-digit numbers, which a tiny model can only compute with a calculator.

They have four digits, so that the number to copy from the calculator is always at the same
distance: the model has two layers and a short warm start.

Invariant: training and held-out products are disjoint: a checksum of the question decides.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from typing import Any, Literal

Split = Literal["train", "held_out"]
HELD_OUT_ONE_IN = 5

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The product of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example 12*34"}},
            "required": ["expression"],
        },
    },
}
_PRODUCT = re.compile(r"\s*(\d{1,6})\s*\*\s*(\d{1,6})\s*")


def calculate(expression: Any) -> str:
    """The tool's answer to an argument that a model wrote, which may be of any type."""
    match = _PRODUCT.fullmatch(expression) if isinstance(expression, str) else None
    if match is None:
        return "error"
    return str(int(match[1]) * int(match[2]))


def questions(split: Split, seed: int) -> Iterator[tuple[int, int]]:
    """Endless pairs of factors of one split; the same seed gives the same ones."""
    rng = random.Random(seed)
    while True:
        a = rng.randint(10, 99)
        b = rng.randint(10, 99)
        held_out = zlib.crc32(text(a, b).encode()) % HELD_OUT_ONE_IN == 0
        if a * b >= 1000 and held_out == (split == "held_out"):
            yield a, b


def text(a: int, b: int) -> str:
    return f"{a} * {b} ="


def prompts(split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` different rows of one split."""
    rows: dict[str, dict[str, Any]] = {}
    for a, b in questions(split, seed):
        question = text(a, b)
        prompt = [{"role": "user", "content": question}]
        rows[question] = {"prompt": prompt, "answer": str(a * b)}
        if len(rows) == count:
            break
    return list(rows.values())


def train_prompts() -> list[dict[str, Any]]:
    return prompts("train", count=2048, seed=1)


def val_prompts() -> list[dict[str, Any]]:
    """Products that neither the warm start nor reinforcement learning has trained on."""
    return prompts("held_out", count=128, seed=2)
