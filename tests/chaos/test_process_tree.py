"""Only a run's own processes are found, each with its part in the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.chaos.process_tree import Process, family, marked, parts, read, target_of

TREE = """
from subprocess import PIPE, Popen

child = Popen(["cat"], stdin=PIPE, stdout=PIPE)
child.stdin.write(b"x")
child.stdin.flush()
child.stdout.read(1)  # it runs its own program, and its environment can be read
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize(
    ("title", "target"),
    [
        ("ray::_EngineActor.generate", "engine"),
        ("ray::_EngineActor", "engine"),
        ("ray::PolicyWorker.call", "rank"),
        ("ray::CriticWorker", "rank"),
        ("ray::RpcActor.exchange_tuples", "environment"),
        ("ray::Controller.run", "controller"),
        ("ray::IDLE", ""),
        ("ray::some_task", ""),
        ("ray::Judge.ask", ""),
        ("/usr/lib/ray/raylet --foo=ray::Controller", ""),
        ("python\0-m\0skyasync", ""),
    ],
)
def test_ray_titles_say_what_a_process_is(title, target):
    assert target_of(title) == target
    assert list(parts([Process(1, "1", title)])) == ([target] if target else [])


def test_only_descendants_are_found_and_signalled():
    root = subprocess.Popen(
        [sys.executable, "-c", TREE], stdout=subprocess.PIPE, env={**os.environ, "MARK": "m-4711"}
    )
    try:
        assert root.stdout is not None
        child = int(root.stdout.readline())
        found = {process.number: process for process in family(root.pid)}
        assert set(found) == {root.pid, child}
        assert {process.number for process in marked("m-4711")} == {root.pid, child}
        assert os.getpid() not in found
        stale = Process(child, "1")
        assert not stale.alive and not stale.send(signal.SIGKILL), (
            "another process has this number now"
        )
        assert found[child].alive and found[child].send(signal.SIGKILL)
        root.wait(10)
        assert not found[child].alive and not found[child].send(signal.SIGKILL)
        assert read(child) is None or not found[child].alive
    finally:
        root.kill()
        root.wait()
