"""Domains with shares: the order of prompts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.data.prompts import PromptStream
from skyasync.errors import UserError
from tests.rollout.episodes import prompt


def stream(sizes, proportions, seed=0, total=None):
    domains = [domain for domain, size in sizes.items() for _ in range(size)]
    dataset = [prompt(row, domain=domain) for row, domain in enumerate(domains)]
    return PromptStream(dataset, 4, seed, total or 5 * len(dataset), proportions)


def drawn(found):
    return [found.prompt(position) for position in range(found.total)]


@given(st.integers(1, 12), st.integers(1, 30), st.floats(0.2, 0.8), st.integers(0, 3))
def test_every_pass_has_the_shares_and_no_row_comes_twice_before_all_came_once(
    small, large, share, seed
):
    size = small + large
    counts = round(share * size)
    if not 0 < counts < size:
        return
    found = drawn(stream({"small": small, "large": large}, {"small": share}, seed))
    for start in range(0, len(found), size):
        number = sum(p.extras["domain"] == "small" for p in found[start : start + size])
        assert abs(number - share * size) < 1
    assert len({p.id for p in found}) == len(found)  # pass and row: an identity
    for domain, rows in (("small", small), ("large", large)):
        mine = [p.id for p in found if p.extras["domain"] == domain]
        assert [i.epoch for i in mine] == [place // rows for place in range(len(mine))]


def test_the_order_is_a_function_of_seed_and_position():
    once, again = (stream({"a": 5, "b": 9}, {"a": 0.5, "b": 0.5}, seed=1) for _ in range(2))
    assert [again.prompt(p).id for p in reversed(range(70))][::-1] == [p.id for p in drawn(once)]
    assert drawn(stream({"a": 5, "b": 9}, {"a": 0.5, "b": 0.5}, seed=2)) != drawn(once)


def test_rows_without_a_share_divide_the_rest_by_their_number():
    found = drawn(stream({"a": 50, "b": 30, "c": 20}, {"a": 0.2}))
    counts = Counter(p.extras["domain"] for p in found)
    assert counts["a"] == 100
    assert counts["b"] == pytest.approx(240, abs=20)  # the others' pass is longer than the stream's


@pytest.mark.parametrize(
    ("sizes", "proportions", "message"),
    [
        ({"a": 4}, {"a": 0.5}, "sum to 0.5, and every row belongs to one of these domains"),
        (
            {"a": 4, "b": 4},
            {"a": 1.0},
            "the other domains has 4 rows, and its proportion of 8 prompts rounds to 0",
        ),
        (
            {"a": 4, "b": 4},
            {"a": 0.01},
            "environment.domains: a has 4 rows, and its proportion of 8 prompts rounds to 0",
        ),
        ({"b": 4}, {"a": 0.5}, "environment.domains: a has 0 rows"),
    ],
)
def test_shares_that_leave_rows_out_are_refused(sizes, proportions, message):
    with pytest.raises(UserError, match=message):
        stream(sizes, proportions)
