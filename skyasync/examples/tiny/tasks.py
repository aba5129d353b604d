"""Procedural instructions for a tiny chat model: sorting, addition, maximum, spelling backwards.

Invariant: training and held-out prompts are disjoint, for all seeds, counts and tasks. A checksum
of the instruction's text alone decides its split (one in five is held out). Every list is drawn
from one split only, also that of the supervised warm start.
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

Row = dict[str, Any]
Split = Literal["train", "held_out"]

EVAL_ONE_IN = 5  # of the texts is held out
SORT_LENGTHS = (4, 8)  # the smallest and the largest number of digits
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

    def row(self) -> Row:
        """A dataset's row: the conversation, its environment, and the environment's columns."""
        return {
            "prompt": [{"role": "user", "content": self.text}],
            "env_class": ENV_CLASS,
            "task": self.task,
            "answer": self.answer,
        }

    def demonstration(self) -> Row:
        """The row with its response, as ``skyasync sft`` learns it."""
        return self.row() | {"completion": self.answer}


# The functions below make an instruction and its answer.


def _sort(rng: random.Random) -> tuple[str, str]:
    digits = rng.choices("0123456789", k=rng.randint(*SORT_LENGTHS))
    return f"Sort the digits: {''.join(digits)}", "".join(sorted(digits))


def _add(rng: random.Random) -> tuple[str, str]:
    a = rng.randint(0, 20)
    b = rng.randint(0, 20)
    return f"Add: {a} + {b}", str(a + b)


def _maximum(rng: random.Random) -> tuple[str, str]:
    a = rng.randint(10, 99)
    b = rng.randint(10, 99)
    c = rng.randint(10, 99)
    return f"Find the largest: {a}, {b}, {c}", str(max(a, b, c))


def _backwards(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 6)))
    return f"Spell backwards: {word}", word[::-1]


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sort": _sort,
    "add": _add,
    "maximum": _maximum,
    "backwards": _backwards,
}


#: The tasks of the warm start; one that is listed more often is drawn more often. Sorting is rare,
#: so that it is left for reinforcement learning.
WARM_START = ("sort",) * 2 + ("add",) * 3 + ("maximum",) * 3 + ("backwards",) * 3


def questions(split: Split, seed: int, tasks: Sequence[str] = tuple(TASKS)) -> Iterator[Question]:
    """Endless questions of one split; the same seed gives the same ones.

    A task that is listed twice is drawn twice as often.

    Raises:
        UserError: for a task that is not in ``TASKS``.
    """
    for task in tasks:
        if task not in TASKS:
            raise UserError(unknown("task", task, TASKS))
    rng = random.Random(seed)
    while True:
        task = rng.choice(tasks)
        text, answer = TASKS[task](rng)
        question = Question(task, text, answer)
        if question.split == split:
            yield question


def prompts(split: Split, count: int, seed: int, tasks: Sequence[str] = ("sort",)) -> list[Row]:
    """``count`` different rows of one split.

    Raises:
        UserError: if fifty times as many draws give fewer different ones.
    """
    by_text: dict[str, Question] = {}
    for draws, question in enumerate(questions(split, seed, tasks)):
        if len(by_text) == count:
            break
        if draws > 50 * count:  # a task such as "add" has few different questions
            raise UserError(
                f"only {len(by_text)} different {split} prompts of {', '.join(tasks)}; asked for {count}"
            )
        by_text.setdefault(question.text, question)
    return [question.row() for question in by_text.values()]


def demonstrations(count: int = 300 * 128) -> list[Row]:
    """The rows of the warm start: prompts of all tasks with their answers.

    By default as many as its 300 steps with 128 rows.
    """
    lessons = islice(questions("train", 0, WARM_START), count)
    return [question.demonstration() for question in lessons]


def train_prompts() -> list[Row]:
    """The prompts of reinforcement learning: sorting, at first about 4 in 10 right."""
    return prompts("train", count=4096, seed=1)


def val_prompts() -> list[Row]:
    """Sorting prompts that neither the warm start nor reinforcement learning has trained on."""
    return prompts("held_out", count=256, seed=2)


class TinyEnv(BaseTextEnv):
    """One turn; reward 1 for ``extras["answer"]``, with or without spaces around it, else 0."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(action.strip() == self.extras["answer"])
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
