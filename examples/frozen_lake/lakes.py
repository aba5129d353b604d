"""Random lakes, by default of 4x4 fields: rows for training and evaluation, and a teacher.

Invariant: a lake is a function of its seed and size alone, and no held-out lake has the same map as
one that is trained on: a checksum of the map decides.
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
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}  # rows, columns
Position = tuple[int, int]  # row and column


@lru_cache(maxsize=65536)
def lake(seed: int, size: int = SIZE) -> tuple[str, ...]:
    """The map that the environment makes of this seed: S start, F frozen, H hole, G goal."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return tuple(generate_random_map(size, seed=seed))


def most_steps(size: int = SIZE) -> int:
    """Steps of a game; the shortest way has ``2 * (size - 1)``."""
    return 2 * size


def split_of(seed: int, size: int = SIZE) -> Split:
    board = "".join(lake(seed, size))
    if zlib.crc32(board.encode()) % HELD_OUT_ONE_IN == 0:
        return "held_out"
    return "train"


def seeds(split: Split, start: int = 0, size: int = SIZE) -> Iterator[int]:
    """Seeds of one split's lakes, upwards from ``start``."""
    for seed in range(start, 1 << 31):
        if split_of(seed, size) == split:
            yield seed


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


def moved(at: Position, action: str, size: int = SIZE) -> Position:
    """The position after a move; the edge of the lake stops it."""
    down, right = MOVES[action]
    row = min(max(at[0] + down, 0), size - 1)
    column = min(max(at[1] + right, 0), size - 1)
    return row, column


def best_actions(board: tuple[str, ...], at: Position) -> list[str]:
    """The first moves of all shortest ways to the goal."""
    distances = _distances(board)
    size = len(board)
    unreachable = size**2 + 1  # more than any distance
    distance_after = {}
    for action in MOVES:
        distance_after[action] = distances.get(moved(at, action, size), unreachable)
    shortest = min(distance_after.values())
    return [action for action, distance in distance_after.items() if distance == shortest]


@lru_cache(maxsize=65536)
def _distances(board: tuple[str, ...]) -> dict[Position, int]:
    """Steps to the goal from every field that has a way to it (breadth-first search)."""
    size = len(board)
    goal = (size - 1, size - 1)
    distances = {goal: 0}
    queue = deque([goal])
    while queue:
        at = queue.popleft()
        for action in MOVES:
            neighbour = moved(at, action, size)
            row, column = neighbour
            if neighbour not in distances and board[row][column] != "H":
                distances[neighbour] = distances[at] + 1
                queue.append(neighbour)
    return distances


def lesson(seed: int, rng: random.Random, careful: float, size: int = SIZE) -> list[dict[str, str]]:
    """The messages of a game of the teacher.

    The teacher takes a best move with probability ``careful``, otherwise any move, so it may fall
    into a hole. A model that learns from it plays like a careless player.
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
        messages.append({"role": "user", "content": near_view(board, at)})
        messages.append({"role": "assistant", "content": action})
        at = moved(at, action, size)
        row, column = at
        if board[row][column] in "HG":  # a hole or the goal ends the game
            break
    return messages
