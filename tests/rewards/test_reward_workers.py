"""A reward worker's process is reused, replaced after errors, and never left over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyasync.errors import UserError
from skyasync.rewards.reward_functions import portable
from skyasync.utils.subprocess_worker import NoAnswerError, SubprocessPool
from tests.rewards import functions

HERE = "tests.rewards.functions"


def named(name):
    return portable(getattr(functions, name, functions.length), f"{HERE}:{name}")


@pytest.fixture
def judge():
    found = SubprocessPool(8)
    yield found
    found.close()


def process(judge):
    return int(judge.call("p", named("process"), {"response": ""}, 5.0).metrics["process"])


def test_a_process_is_kept_until_it_is_lost(judge):
    first = process(judge)
    assert process(judge) == first
    with pytest.raises(NoAnswerError, match=r"did not return within 0.3 s"):
        judge.call("h", named("hangs"), {"response": "hang"}, 0.3)
    assert not Path(f"/proc/{first}").exists()
    assert process(judge) != first


def test_delayed_effects_of_a_call_are_not_the_result_of_the_next(judge):
    first = process(judge)
    assert judge.call("l", named("leaves_later"), {"response": ""}, 5.0).reward == 1.0
    soon(lambda: not is_running(first))
    assert process(judge) != first


def test_a_module_that_cannot_be_loaded_is_an_error_and_not_a_lost_result(judge, tmp_path):
    (tmp_path / "leaving.py").write_text("import os\nos._exit(1)\ndef f(response): ...\n")
    with pytest.raises(UserError, match="cannot be loaded: it ended its process"):
        judge.call("f", portable(len, f"{tmp_path}/leaving.py:f"), {"response": ""}, 5.0)


@pytest.mark.parametrize(
    ("first", "busy"), [("process", False), ("leaves_a_thread", False), ("process", True)]
)
def test_the_process_ends_with_the_one_that_started_it(first, busy):
    program = (
        "import os, threading\n"
        "from skyasync.utils.subprocess_worker import SubprocessPool\n"
        "from tests.rewards.test_reward_workers import named\n"
        "judge = SubprocessPool(8)\n"
        f"score = judge.call('p', named({first!r}), {{'response': ''}}, 5.0)\n"
        "print(int(score.metrics['process']), flush=True)\n"
        f"if {busy}: judge.call('h', named('holds_the_interpreter'), {{'response': 'hang'}}, 0.4)\n"
        "else: input()"
    )
    limits = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    starter = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=limits,
        text=True,
    )
    child = int(starter.stdout.readline())
    if busy:
        soon(lambda: computes(child))
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdin.close()
    starter.stdout.close()
    soon(lambda: not is_running(child))


def soon(condition, patience_s=20.0):
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(process_id):
    """Whether any of its threads runs: the first one is a zombie as soon as another ends the process."""
    try:
        threads = [stat.read_text() for stat in Path(f"/proc/{process_id}/task").glob("*/stat")]
    except OSError:
        return False
    return any(thread.rpartition(")")[2].split()[0] != "Z" for thread in threads)


def computes(process_id):
    """Whether it has used CPU time since the call began: its state is running."""
    return (
        is_running(process_id)
        and Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    )
