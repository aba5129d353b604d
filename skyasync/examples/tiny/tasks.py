"""Procedural instructions for a tiny chat model: sorting, addition, maximum, spelling backwards.

Invariant: training and held-out prompts are disjoint, for all seeds, counts and tasks. A checksum
of the instruction's text alone decides its side (one in five is held out). Every list is drawn from
one side only, also that of the supervised warm start.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.errors import UserError, unknown

Split = Literal["train", "held_out"]

EVAL_ONE_IN = 5
SORT_LENGTHS = (4, 8)  # digits, both ends included
ENV_CLASS = "skyasync.examples.tiny.tasks:TinyEnv"


@dataclass(frozen=True)
class Question:
    """One instruction and the only answer that is right."""

    task: str
    text: str
    answer: str

    @property
    def split(self) -> Split:
        if zlib.crc32(self.text.encode()) % EVAL_ONE_IN == 0:
            return "held_out"
        return "train"

    def row(self) -> dict[str, Any]:
        """As a dataset's row: the conversation, its environment, and the environment's columns."""
        messages = [{"role": "user", "content": self.text}]
        return {
            "prompt": messages,
            "env_class": ENV_CLASS,
            "task": self.task,
            "answer": self.answer,
        }

    def demonstration(self) -> dict[str, Any]:
        """The row with its response, as ``skyasync sft`` learns it."""
        return self.row() | {"completion": self.answer}


def _sort(rng: random.Random) -> tuple[str, str]:
    digits = rng.choices("0123456789", k=rng.randint(*SORT_LENGTHS))
    return f"Sort the digits: {''.join(digits)}", "".join(sorted(digits))


def _add(rng: random.Random) -> tuple[str, str]:
    a = rng.randint(0, 20)
    b = rng.randint(0, 20)
    return f"Add: {a} + {b}", str(a + b)


def _maximum(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randint(10, 99) for _ in range(3)]
    return f"Find the largest: {', '.join(map(str, numbers))}", str(max(numbers))


def _backwards(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 6)))
    return f"Spell backwards: {word}", word[::-1]


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sort": _sort,
    "add": _add,
    "maximum": _maximum,
    "backwards": _backwards,
}


WARM_START = ("sort",) * 2 + ("add",) * 3 + ("maximum",) * 3 + ("backwards",) * 3  # drawn evenly


def questions(split: Split, seed: int, tasks: Sequence[str] = tuple(TASKS)) -> Iterator[Question]:
    """Endless questions of one side; the same seed gives the same ones. A task listed twice is
    drawn twice as often.

    Raises:
        UserError: for a task that is not in ``TASKS``.
    """
    for task in tasks:
        if task not in TASKS:
            raise UserError(unknown("task", task, TASKS))
    rng = random.Random(seed)
    while True:
        task = rng.choice(tasks)
        question = Question(task, *TASKS[task](rng))
        if question.split == split:
            yield question


def prompts(
    split: Split, count: int, seed: int, tasks: Sequence[str] = ("sort",)
) -> list[dict[str, Any]]:
    """``count`` different rows of one side.

    Raises:
        UserError: if fifty times as many draws give fewer different ones.
    """
    chosen: dict[str, Question] = {}
    for draws, question in enumerate(questions(split, seed, tasks)):
        if len(chosen) == count:
            break
        if draws > 50 * count:
            raise UserError(
                f"only {len(chosen)} different {split} prompts of {', '.join(tasks)}; asked for {count}"
            )
        chosen.setdefault(question.text, question)
    return [question.row() for question in chosen.values()]


def demonstrations(count: int = 300 * 128) -> list[dict[str, Any]]:
    """What the warm start learns: prompts of all tasks with their answers."""
    return [
        question.demonstration() for question in islice(questions("train", 0, WARM_START), count)
    ]


def train_prompts() -> list[dict[str, Any]]:
    """What reinforcement learning trains on: sorting, of which the warm start gets about 4 in 10
    right."""
    return prompts("train", count=4096, seed=1)


def val_prompts() -> list[dict[str, Any]]:
    """Sorting prompts that neither the warm start nor reinforcement learning has trained on."""
    return prompts("held_out", count=256, seed=2)


class TinyEnv(BaseTextEnv):
    """One turn; only ``extras["answer"]`` earns the reward (spaces and newlines around it do not
    matter)."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(action.strip() == self.extras["answer"])
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
