"""Several functions on one response: arguments, limits, errors. Each in a real process or on a real event loop."""

import os
import threading
import time

import pytest

from skyasync.errors import UserError
from skyasync.rewards import REWARDS
from skyasync.rewards.reward_functions import RewardFunction, score_response

HERE = "tests.rewards.functions"
KNOWN = {"prompt": "question", "response": "answer", "label": "x", "messages": [], "source": "book"}


def scores(*names, limit_s=20.0, **known):
    return score_response(
        [RewardFunction.of(name if ":" in name else f"{HERE}:{name}") for name in names],
        {**KNOWN, **known},
        limit_s,
    )


def test_a_function_takes_what_it_names_or_everything():
    assert scores("length", "scored")[0].reward == 0.6
    (found,) = scores("everything")
    assert found.metrics == {"prompt_length": 8.0, "columns": 2.0}  # messages and source


def test_a_function_of_a_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp(
        "mine"
    )  # survives this test: a process that is replaced loads it again
    (folder / "mine.py").write_text("def good(response):\n    return float('good' in response)\n")
    assert scores(f"{folder}/mine.py:good", response="good")[0].reward == 1.0


def test_functions_run_in_a_process_of_their_own_where_signals_work():
    first, second = scores("process", "uses_signals")
    assert first.metrics["process"] != os.getpid()
    assert second.reward == 1.0
    assert scores("process") == [first]  # which is kept


def test_a_function_that_only_the_program_has():
    def mine(response):
        return float(len(response))

    member = RewardFunction.of("mine", mine)
    assert score_response([member], KNOWN, 20.0)[0].reward == 6.0


def test_coroutines_wait_side_by_side():
    assert [score.reward for score in scores(*["waits_for_four_others"] * 5)] == [1.0] * 5


async def test_it_works_where_an_event_loop_runs():
    assert [score.reward for score in scores("slow_server", "length")] == [1.0, 0.6]


@pytest.mark.matrix
@pytest.mark.slow
def test_a_response_that_takes_long_holds_up_no_other_thread(tmp_path):
    ended, awaited = [], tmp_path / "awaited"
    slow = threading.Thread(
        target=lambda: ended.append(scores("waits", response=awaited, limit_s=240.0)[0].reward)
    )
    slow.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    quick = [scores("process")[0].metrics["process"] for _ in range(3)]
    assert ended == []
    assert len(set(quick)) == 1
    awaited.touch()
    slow.join()
    assert ended == [1.0]


@pytest.mark.parametrize(
    "name",
    [
        "hangs",
        pytest.param("holds_the_interpreter", marks=pytest.mark.matrix),
        "hangs_politely",
        "leaves",
    ],
)
def test_a_function_without_a_result_counts_as_no_reward_and_the_next_call_works(name):
    lost, other = scores(name, "length", response="hang, leave", limit_s=0.5)
    assert (lost.reward, lost.no_reward) == (0.0, True)
    assert other.reward > 0
    if name != "hangs_politely":
        assert scores(name)[0].reward == 1.0


def test_a_function_that_calls_exit_has_no_result():
    assert scores("leaves", response="exit")[0].no_reward


@pytest.mark.matrix
@pytest.mark.parametrize(
    "value", ["nan", "text", "none", "true", "empty", "rewrd", "metric", "list"]
)
def test_what_is_no_reward_is_refused_by_name(value):
    with pytest.raises(UserError, match=f"reward function {HERE}:returned"):
        scores("returned", value=value)


def test_a_coroutine_that_returns_no_reward_is_refused_by_name():
    with pytest.raises(UserError, match=f"reward function {HERE}:async_text is 'good'"):
        scores("async_text")


@pytest.mark.parametrize("name", ["raises", "raises_later"])
def test_an_error_in_a_function_is_raised_as_it_was_with_its_name(name):
    with pytest.raises(ZeroDivisionError, match="no words to divide by") as raised:
        scores(name)
    assert f"raised by reward function {HERE}:{name}" in raised.value.__notes__


def test_the_functions_own_timeout_is_an_error_like_others():
    with pytest.raises(TimeoutError, match="the server said so"):
        scores("raises_its_own_timeout")


def test_an_error_that_cannot_travel_is_told_in_words():
    with pytest.raises(RuntimeError, match="this and that"):
        scores("raises_its_own")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lenght", "did you mean 'length'"),
        ("needs_more", r"needs 'lable': did you mean 'label'\? the row gives: prompt, "),
        ("by_position", "takes response by position only"),
        ("not_a_function", "cannot be called: it is 3"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        scores(name)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(
        UserError, match="unknown reward function 'exact_mach': did you mean 'exact_match'"
    ):
        RewardFunction.of("exact_mach")


@pytest.mark.parametrize("name", REWARDS.names())
def test_every_built_in_function_is_found(name):
    assert RewardFunction.of(name).name == name
