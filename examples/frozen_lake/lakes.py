"""Random lakes, by default of 4x4 fields: rows for training and evaluation, and a teacher that
knows the way.

Invariant: a lake is a function of its seed and size alone, and no held-out lake has the same map as
one that is trained on: a checksum of the map decides its side.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

from skyasync.envs.adapters.gymnasium import near_view

Split = Literal["train", "held_out"]

SIZE = 4
HELD_OUT_ONE_IN = 5
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
Place = tuple[int, int]


@lru_cache(maxsize=65536)
def lake(seed: int, size: int = SIZE) -> tuple[str, ...]:
    """The map that the environment makes of this seed: S start, F frozen, H hole, G goal."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return tuple(generate_random_map(size, seed=seed))


def most_steps(size: int = SIZE) -> int:
    """Steps of a game; the shortest way has ``2 * (size - 1)``."""
    return 2 * size


def split_of(seed: int, size: int = SIZE) -> Split:
    if zlib.crc32("".join(lake(seed, size)).encode()) % HELD_OUT_ONE_IN == 0:
        return "held_out"
    return "train"


def seeds(split: Split, start: int = 0, size: int = SIZE) -> Iterator[int]:
    """Seeds of one side's lakes, upwards."""
    return (seed for seed in range(start, 1 << 31) if split_of(seed, size) == split)


def row(seed: int, size: int = SIZE) -> dict[str, Any]:
    """A dataset's row: the environment draws the lake below the (empty) prompt."""
    return {
        "prompt": [{"role": "user", "content": ""}],
        "env_class": "gymnasium",
        "gym_id": "FrozenLake-v1",
        "gym_args": {"map_size": size, "is_slippery": False},
        "view": "near",
        "max_steps": most_steps(size),
        "seed": seed,
    }


def train_lakes(count: int = 2048, size: int = SIZE) -> list[dict[str, Any]]:
    return [row(seed, size) for seed in islice(seeds("train", 100_000, size), count)]


def val_lakes(count: int = 128, size: int = SIZE) -> list[dict[str, Any]]:
    return [row(seed, size) for seed in islice(seeds("held_out", size=size), count)]


def moved(at: Place, action: str, size: int = SIZE) -> Place:
    down, right = MOVES[action]
    return min(max(at[0] + down, 0), size - 1), min(max(at[1] + right, 0), size - 1)


def best_actions(board: tuple[str, ...], at: Place) -> list[str]:
    """The first moves of all shortest ways to the goal."""
    distances = _distances(board)
    size = len(board)
    near = {action: distances.get(moved(at, action, size), size**2 + 1) for action in MOVES}
    return [action for action in MOVES if near[action] == min(near.values())]


@lru_cache(maxsize=65536)
def _distances(board: tuple[str, ...]) -> dict[Place, int]:
    """Steps to the goal from every field that has a way to it."""
    size = len(board)
    goal = (size - 1, size - 1)
    distances = {goal: 0}
    queue = deque([goal])
    while queue:
        at = queue.popleft()
        for action in MOVES:
            neighbour = moved(at, action, size)
            if neighbour not in distances and board[neighbour[0]][neighbour[1]] != "H":
                distances[neighbour] = distances[at] + 1
                queue.append(neighbour)
    return distances


def lesson(seed: int, rng: random.Random, careful: float, size: int = SIZE) -> list[dict[str, str]]:
    """A game played by its teacher: a best move with probability ``careful``, otherwise any; it may
    fall into a hole.

    Every answer is a move of a good or a careless player, so a model that learns from it plays like
    one.
    """
    board = lake(seed, size)
    at = (0, 0)
    messages = []
    for _ in range(most_steps(size)):
        if rng.random() < careful:
            choices = best_actions(board, at)
        else:
            choices = list(MOVES)
        action = rng.choice(choices)
        messages += [
            {"role": "user", "content": near_view(board, at)},
            {"role": "assistant", "content": action},
        ]
        at = moved(at, action, size)
        if board[at[0]][at[1]] in "HG":
            break
    return messages
