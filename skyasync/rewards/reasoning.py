"""Procedural tasks of ``reasoning-gym``: their questions as rows, and their scorers as a reward.

Invariant: training and held-out questions come from separate ranges of seeds. The n-th question is
made from seed + n, so neighbouring seeds would give almost the same questions.

Some scorers run ``eval`` on the answer, and some never return on unusual answers. So the reward is
not ``quick``: it runs in a reward worker, which is not a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from types import ModuleType
from typing import Any, Protocol

from skyasync.errors import MissingExtraError, UserError, unknown
from skyasync.rewards import REWARDS, Capabilities

Entry = dict[str, Any]  # a question of the library, or a row

# The library's own default is 500 questions.
SIZE = 500
EVAL_SIZE = 100
# Options that are read here and are not passed on to the task.
OURS = ("size", "seed", "val_size", "val_seed")


def rows(task: str, options: Mapping[str, Any], seed: int, *, evaluation: bool) -> list[Entry]:
    """Questions of one task.

    Args:
        options: ``size``, ``seed``, ``val_size``, ``val_seed``, and the task's own.
        seed: of the training questions, unless the options name one.
        evaluation: the held-out questions; else the training questions.

    Raises:
        UserError: for an unknown task or option, or seeds whose questions would overlap.
    """
    task_options = {name: value for name, value in options.items() if name not in OURS}
    size = int(options.get("size", SIZE))
    val_size = int(options.get("val_size", EVAL_SIZE))
    train_seed = int(options.get("seed", seed))
    # Seeds have 32 bits, and half of their range lies between the two.
    val_seed = int(options.get("val_seed", (train_seed + 2**31) % 2**32))
    if train_seed < val_seed + val_size and val_seed < train_seed + size:
        raise UserError(
            f"data.reasoning_gym.{task}: {size} questions from seed {train_seed} and {val_size} held-out ones from "
            f"val_seed {val_seed} overlap: set val_seed to {train_seed + size} or more"
        )
    if evaluation:
        dataset = make(task, task_options, seed=val_seed, size=val_size)
        count = val_size
    else:
        dataset = make(task, task_options, seed=train_seed, size=size)
        count = size
    options_text = json.dumps(task_options, sort_keys=True)  # as text: a key of a cache of scorers
    questions = []
    for index in range(count):
        entry = dataset[index]
        questions.append(
            {
                "prompt": entry["question"],
                "label": entry["answer"],
                "domain": task,
                "env_class": "reward",
                "reward_funcs": ["reasoning_gym"],
                "reasoning_gym": {"task": task, "options": options_text, "entry": entry},
            }
        )
    return questions


class Puzzles(Protocol):
    """A data set of the library."""

    def __getitem__(self, index: int) -> Entry: ...
    def score_answer(self, answer: str, entry: Entry) -> float: ...


def make(task: str, options: Mapping[str, Any], **more: object) -> Puzzles:
    """The task's data set.

    Raises:
        UserError: for an unknown task, an unknown option, or a value that the task refuses.
    """
    datasets = _library().factory
    tasks = sorted(set(datasets.DATASETS) - {"composite"})  # a mixture: name the tasks themselves
    if task not in tasks:
        raise UserError(unknown("reasoning_gym task", task, tasks))
    allowed = {field.name for field in fields(datasets.DATASETS[task][1])} - {"seed", "size"}
    for name in options:
        if name not in allowed:
            raise UserError(
                f"data.reasoning_gym.{task}: {unknown('option', name, [*allowed, *OURS])}"
            )
    try:
        return datasets.create_dataset(task, **options, **more)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"data.reasoning_gym.{task}: {error or 'a value that the task refuses'}"
        ) from error


def _library() -> ModuleType:
    try:
        import reasoning_gym.factory
    except ModuleNotFoundError as error:
        raise MissingExtraError("reasoning-gym", "reasoning-gym") from error
    return reasoning_gym


@REWARDS.register("reasoning_gym", extra="reasoning-gym")
@Capabilities(load=_library)
def score(response: str, reasoning_gym: Entry) -> float:
    """The task's own score of the answer.

    The answer is the content of the last ``<answer>`` element, or else the complete response. One
    on which the scorer fails is worth 0, like any other that it cannot read.
    """
    from reasoning_gym.utils import extract_answer

    task = _task(reasoning_gym["task"], reasoning_gym["options"])
    answer = extract_answer(response)
    if answer is None:
        answer = response.strip()
    try:
        return float(task.score_answer(answer, reasoning_gym["entry"]))
    except Exception:  # scorers do not agree on what they raise for an answer that they cannot read
        return 0.0


@lru_cache(maxsize=256)
def _task(name: str, options: str) -> Puzzles:
    return make(name, json.loads(options))
