"""A child process for functions that may do anything: each call has its own answer, within its limit."""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyasync.errors import TransientError
from skyasync.utils.subprocess_worker import NoAnswerError, SubprocessPool
from tests.chaos.process_tree import marked
from tests.utils.functions import behave

pytestmark = pytest.mark.slow

BEHAVE, MARK = pickle.dumps(behave), "SKYASYNC_TEST_APART"
BIG = 3 << 20  # bytes: more than a socket takes without a reader
ENDS, SLACK_S = 30.0, 10.0  # limits of a call that ends; seconds that a busy machine may take
ANSWERS = ("", "fork", "fork and stay")
HANGS = ("hang", "stop", "start a child and hang")
FAILS = {  # other results of a call
    **{what: NoAnswerError for what in (*HANGS, "exit", "end", "return what cannot be read", "garbage", "close",
                                    "return what exits", "return what ends", "start a program and end",
                                    "say too much")},
    "raise what hangs": TransientError,
    "interrupt": RuntimeError, "raise": ZeroDivisionError, "raise its own": RuntimeError,
    "return what cannot travel": (AttributeError, pickle.PicklingError),
}  # fmt: skip


@pytest.fixture(scope="module")
def mark():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, name := uuid.uuid4().hex)
        yield f"{MARK}={name}"


@pytest.fixture(scope="module")
def pool(mark):
    found = SubprocessPool(2)
    found.load("f", BEHAVE)
    yield found
    found.close()
    assert none_soon(mark) == []


def none_soon(mark, title=""):
    deadline = time.monotonic() + SLACK_S
    while (
        left := [each for each in marked(mark) if title in each.title]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def ask(pool, what, number, size=0):
    payload = b"\xff" * size
    limit_s, began = 0.4 if what in HANGS else ENDS, time.monotonic()
    try:
        with pool.alone() as process:
            began = time.monotonic()
            return process.call(
                "f", BEHAVE, {"what": what, "mark": number, "payload": payload}, limit_s
            )
    except Exception as error:
        return error
    finally:
        assert time.monotonic() - began < limit_s + SLACK_S


calls = st.tuples(st.sampled_from([*ANSWERS, *FAILS]), st.sampled_from([0, 20, BIG]))


@pytest.mark.matrix
@example([(what, 0) for what in (*ANSWERS, *FAILS)])
@example([(what, BIG) for what in (*ANSWERS, "garbage", "stop", "end")])
@given(st.lists(calls, min_size=2, max_size=4))
@settings(max_examples=4)
def test_every_answer_belongs_to_its_own_call_and_comes_within_the_limit(pool, asked):
    with ThreadPoolExecutor(2) as threads:
        answers = list(
            threads.map(
                lambda each: ask(pool, *each),
                [(what, n, size) for n, (what, size) in enumerate(asked)],
            )
        )
    for number, ((what, size), answer) in enumerate(zip(asked, answers, strict=True)):
        if what in ANSWERS:
            assert answer == (number, b"\xff" * size)
        else:
            assert isinstance(answer, FAILS[what])
            if what in ("raise", "raise its own"):
                assert str(number) in str(answer)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("start a program and end", "it ended its process"),
        ("say too much", "it has 1099511627776 bytes"),
        ("return what exits", "sys.exit is no data"),
    ],
)
def test_an_answer_that_cannot_be_taken_is_not_waited_for(pool, what, why):
    assert why in str(ask(pool, what, 1))


def test_what_an_ended_call_has_started_ends_with_it(pool, mark):
    assert isinstance(ask(pool, "start a child and hang", 1), NoAnswerError)
    assert (
        none_soon(mark, "sleep") == []
    )  # it has been killed, and the system ends it in its own time


@pytest.mark.parametrize("size", [10, BIG])
def test_the_limit_holds_where_the_child_is_stopped_before_it_is_asked(mark, size):
    pool = SubprocessPool(1)
    assert ask(pool, "stop behind the answer", 1) == (1, b"")
    time.sleep(0.5)
    with pool.alone() as child:
        began = time.monotonic()
        with pytest.raises(NoAnswerError, match=r"did not return within 0\.5 s"):
            child.call("f", BEHAVE, {"what": "", "mark": 2, "payload": b"x" * size}, 0.5)
        assert time.monotonic() - began < 0.5 + SLACK_S
    assert ask(pool, "", 3) == (3, b"")
    pool.close()


class Stand:
    """A worker that does nothing."""

    is_quiet = True

    def __init__(self, number):
        self.number, self.lost = number, None

    def kill(self):
        self.lost = RuntimeError("killed")


def stands(count):
    started = []

    def start():
        started.append(Stand(len(started)))
        return started[-1]

    return SubprocessPool(count, start), started


def test_those_who_want_one_alone_share_none_and_wait_for_the_next_that_is_free():
    made, started = stands(2)
    inside, most, lock = [], [], threading.Lock()

    def work():
        for _ in range(50):
            with made.alone() as process:
                with lock:
                    inside.append(process.number)
                    most.append(len(inside))
                    assert inside.count(process.number) == 1
                with lock:
                    inside.remove(process.number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(most) == 400
    assert max(most) <= 2
    assert len(started) <= 2


def test_the_wait_for_a_worker_goes_on_while_calls_end_and_then_has_a_limit(monkeypatch):
    monkeypatch.setattr("skyasync.utils.subprocess_worker.START_S", 0.5)
    pool, _ = stands(1)
    served = []

    def caller(number):
        with pool.alone():
            time.sleep(0.1)
            served.append(number)

    callers = [threading.Thread(target=caller, args=[number]) for number in range(12)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(20)
    assert len(served) == 12, "the queue takes twice the limit, and moves"
    with (
        pool.alone(),
        pytest.raises(TimeoutError, match=r"no worker process became free within 0\.5 s"),
        pool.alone(),
    ):
        raise AssertionError("there is one worker")
    with pool.alone():
        served.append("again")


def test_sequential_callers_share_one_process():
    made, started = stands(8)
    for _ in range(3):
        with made.alone() as process:
            assert process.number == 0
    assert len(started) == 1


def test_what_is_lost_while_somebody_has_it_is_replaced_for_the_next():
    made, _ = stands(1)
    with made.alone() as process:
        process.kill()
    with made.alone() as process:
        assert process.number == 1
