"""Sokoban, by TextArena: rows of random boards for training and evaluation.

    uv run --extra textarena -m skyasync data.train_data=[examples.sokoban.boards:train_boards] \
        data.val_data=[examples.sokoban.boards:val_boards] trainer.policy.model.path=...
        generator.max_turns=10

The model answers with [up], [down], [left] or [right]; the reward, at the end, is the fraction of
boxes on targets.

Invariant: a board is a function of its seed, and the seeds for evaluation are not among those for
training.
"""

from __future__ import annotations

from typing import Any

# The first seeds; there must be fewer held-out boards than numbers between them.
TRAIN = 100_000
HELD_OUT = 0


def row(seed: int, size: int = 6, boxes: int = 1, max_steps: int = 10) -> dict[str, Any]:
    """A dataset's row: the environment draws the board below the prompt."""
    task = "Push every box onto a target. Answer with one move in brackets."
    return {
        "prompt": [{"role": "user", "content": task}],
        "env_class": "textarena",
        "textarena_id": "Sokoban-v0",
        "textarena_args": {"dim_room": [size, size], "num_boxes": boxes},
        "max_steps": max_steps,
        "seed": seed,
    }


def train_boards(count: int = 1024) -> list[dict[str, Any]]:
    return [row(TRAIN + number) for number in range(count)]


def val_boards(count: int = 128) -> list[dict[str, Any]]:
    return [row(HELD_OUT + number) for number in range(count)]
