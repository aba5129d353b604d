import re
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.envs import env_factory
from skyasync.errors import UserError
from skyasync.examples.tiny.tasks import (
    SORT_LENGTHS,
    TASKS,
    Question,
    TinyEnv,
    prompts,
    questions,
    train_prompts,
    val_prompts,
)

seeds = st.integers(min_value=0, max_value=2**32)


def _first(task: str, seed: int) -> Question:
    return next(questions("train", seed, (task,)))


@given(seeds)
def test_sort_is_answered_with_the_same_digits_in_order(seed):
    question = _first("sort", seed)
    digits = question.text.removeprefix("Sort the digits: ")
    assert list(question.answer) == sorted(digits)
    assert SORT_LENGTHS[0] <= len(digits) <= SORT_LENGTHS[1]


@given(seeds)
def test_add_is_answered_with_the_sum(seed):
    question = _first("add", seed)
    numbers = [int(number) for number in re.findall(r"\d+", question.text)]
    assert len(numbers) == 2 and max(numbers) <= 20
    assert int(question.answer) == sum(numbers)


@given(seeds)
def test_maximum_is_answered_with_the_largest(seed):
    question = _first("maximum", seed)
    assert int(question.answer) == max(int(number) for number in re.findall(r"\d+", question.text))


@given(seeds)
def test_backwards_is_answered_with_the_reversed_word(seed):
    question = _first("backwards", seed)
    assert question.answer == "".join(reversed(question.text.split()[-1]))


@given(seeds, seeds)
def test_held_out_questions_never_occur_in_training_whatever_the_seeds(train_seed, held_out_seed):
    train = {q.text for q in islice(questions("train", train_seed), 200)}
    held_out = {q.text for q in islice(questions("held_out", held_out_seed), 200)}
    assert not train & held_out


def test_same_seed_gives_the_same_questions_and_another_seed_others():
    first, again, other = (list(islice(questions("train", seed), 50)) for seed in (3, 3, 4))
    assert first == again != other


def test_every_task_occurs_on_both_sides():
    for split in ("train", "held_out"):
        assert {q.task for q in islice(questions(split, 0), 200)} == set(TASKS)


def test_default_prompts_are_distinct_disjoint_and_the_same_every_time():
    train, held_out = train_prompts(), val_prompts()
    assert (train, held_out) == (train_prompts(), val_prompts())
    texts = [row["prompt"][0]["content"] for row in train + held_out]
    assert len(set(texts)) == len(texts) == len(train) + len(held_out)
    assert {row["task"] for row in train + held_out} == {"sort"}


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(UserError, match="different held_out prompts of add; asked for 441"):
        prompts("held_out", 441, seed=0, tasks=("add",))


def test_unknown_task_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="unknown task 'sorting': did you mean 'sort'"):
        next(questions("train", 0, ("sorting",)))


def test_row_names_an_environment_that_rewards_its_answer():
    row = train_prompts()[0]
    assert env_factory(row["env_class"]) is TinyEnv


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        ("123", 1.0),
        (" 123\n", 1.0),
        ("1234", 0.0),
        ("12", 0.0),
        ("1 2 3", 0.0),
        ("", 0.0),
        ("The answer is 123", 0.0),
    ],
)
def test_only_exactly_the_answer_is_rewarded_and_ends_the_episode(action, reward):
    output = TinyEnv({}, {"answer": "123"}).step(action)
    assert (output["reward"], output["done"], output["observations"]) == (reward, True, [])
