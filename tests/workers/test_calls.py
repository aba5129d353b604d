"""State between calls: after any call, the next one finds the worker sharded, complete and with its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyasync.config.schema import Config
from skyasync.workers.frozen import ReferenceWorker
from skyasync.workers.policy import PolicyWorker
from tests.workers import calls
from tests.workers.conftest import config_for, make_model
from tests.workers.processes import Ranks

pytestmark = pytest.mark.slow

SETTINGS = [
    (1, "float32"),
    (1, "bfloat16"),
    (2, "float32"),
    pytest.param(2, "bfloat16", marks=pytest.mark.matrix),
]
EVERY_PAIR = [
    call
    for i, a in enumerate(calls.CALLS)
    for b in calls.CALLS[i:]
    for call in dict.fromkeys((a, b))
]
"""Each call after each other one and after itself: a de Bruijn sequence."""


def config(path: str, dtype: str) -> Config:
    cfg = config_for(path)
    cfg.trainer.policy.model.dtype = cfg.trainer.ref.model.dtype = dtype
    cfg.trainer.ref.model.path = path
    return cfg


@pytest.mark.parametrize(("count", "dtype"), SETTINGS)
@settings(max_examples=4)
@given(drawn=st.lists(st.sampled_from(calls.CALLS), min_size=3, max_size=8), tied=st.booleans())
@example(drawn=["score", "save"], tied=True)
def test_calls_in_any_order_leave_a_policy_sharded_and_change_only_what_they_should(
    count: int, dtype: str, drawn: list[str], tied: bool, tied_model: str, untied_model: str,
    ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    group = ranks(count)
    group.set_up(PolicyWorker, config(tied_model if tied else untied_model, dtype))
    assert_alike(group.call(calls.play, drawn, str(tmp_path_factory.mktemp("calls"))))


@pytest.mark.matrix
def test_every_call_may_follow_every_other(
    untied_model: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    group = ranks(2)
    group.set_up(PolicyWorker, config(untied_model, "float32"))
    assert_alike(group.call(calls.play, EVERY_PAIR, str(tmp_path)))


def assert_alike(digests: list[str]) -> None:
    assert all(others == digests[0] for others in digests)


@pytest.mark.parametrize(("count", "dtype"), SETTINGS)
def test_a_reference_is_sharded_between_calls_and_its_answer_stays(
    count: int, dtype: str, untied_model: str, ranks: Callable[[int], Ranks]
) -> None:
    group = ranks(count)
    group.set_up(ReferenceWorker, config(untied_model, dtype))
    group.call(calls.remember_parameters)
    answers = [group.call(calls.logprobs, seed) for seed in (1, 2, 1)]
    assert answers[0] == answers[2]


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_ranks_goes_on_from_any_others_checkpoint(
    dtype: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """4, 2, 1, 2 and 4 ranks take a step each, with a layer so narrow that some ranks have no part of it."""
    cfg = config(make_model(tmp_path / "model", tied=True, intermediate_size=5), dtype)
    whole = None
    for number, count in enumerate((4, 2, 1, 2, 4)):
        group = ranks(count)
        group.set_up(PolicyWorker, cfg)
        if whole is not None:
            assert group.call(calls.load_whole, str(tmp_path / str(number - 1)))[0] == whole
        whole = group.call(calls.step_and_save, str(tmp_path / str(number)))[0]
    again = ranks(4)
    again.set_up(PolicyWorker, cfg)
    again.call(calls.load_whole, str(tmp_path / "3"))
    assert again.call(calls.step_and_save, str(tmp_path / "again"))[0] == whole, (
        "bitwise identical on the same number of ranks"
    )
