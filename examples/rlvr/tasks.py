"""Sums and sorting as rows of two domains: the question, the right answer, and the domain.

Invariant: training and held-out prompts are disjoint (see ``skyasync.examples.tiny.tasks``).
"""

from __future__ import annotations

from typing import Any

from skyasync.examples.tiny.tasks import Split, prompts

#: Rows by split and task. There are only 441 different sums, so few of them.
COUNTS = {"train": {"add": 256, "sort": 2048}, "held_out": {"add": 64, "sort": 192}}


def rows(split: Split, seed: int) -> list[dict[str, Any]]:
    """Rows without an environment: ``environment.domains`` selects their reward functions."""
    result = []
    for task, count in COUNTS[split].items():
        for row in prompts(split, count, seed, (task,)):
            result.append({"prompt": row["prompt"], "domain": task, "label": row["answer"]})
    return result


def train_prompts() -> list[dict[str, Any]]:
    return rows("train", seed=1)


def val_prompts() -> list[dict[str, Any]]:
    return rows("held_out", seed=2)
