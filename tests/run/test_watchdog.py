"""The files of Ray that a killed program leaves, and who can read them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from skyasync.run import ray_cluster
from skyasync.run.watchdog import Watchdog, marked, private_folder
from tests.end_to_end import leftovers

PROGRAM = """
import os, subprocess, sys, time
from skyasync.run.watchdog import Watchdog, marked
dog = Watchdog(grace_s=3.0)
os.environ |= dog.variables
subprocess.Popen(["sh", "-c", "sleep 600 & exec sleep 600"], process_group=0)
while [open(f"/proc/{each}/comm").read() for each in marked(dog.mark)] != ["sleep\\n"] * 2: time.sleep(0.01)
open(os.path.join(dog.folder, "x"), "w").close()
os.symlink("/", os.path.join(dog.folder, "all"))
if os.fork() == 0:  # a fork that is_running on holds the pipe
    time.sleep(1); os._exit(0)
print(dog.mark, dog.folder, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], object], limit_s: float = 30.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + limit_s
        time.sleep(0.05)
    return time.monotonic() - began


def sleepers() -> set[int]:
    shown = subprocess.run(
        ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout
    return {int(line.split()[0]) for line in shown.splitlines() if line.endswith(" sleep 600")}


@pytest.mark.matrix
@pytest.mark.slow
def test_what_a_killed_program_has_started_ends_with_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = sleepers()
    program = subprocess.Popen(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n{PROGRAM}"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdout is not None
    mark, folder = program.stdout.readline().split()
    assert len(sleepers() - before) == 2
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    program.kill()
    program.wait()
    assert until(lambda: not os.path.exists(folder), 25) >= 2.5, "they may end by themselves first"
    assert not sleepers() - before
    assert not [each for each in marked(mark) if each != program.pid]


def test_closing_waits_for_nothing_and_touches_no_other(tmp_path: Path) -> None:
    dog, other = Watchdog(), subprocess.Popen(["sleep", "600"])
    mine = subprocess.Popen(["sleep", "600"], env={**os.environ, "SKYASYNC_STARTED_BY": dog.mark})
    until(lambda: marked(dog.mark))
    began = time.monotonic()
    dog.close()
    dog.close()
    assert time.monotonic() - began < 5
    assert mine.wait(5) == -signal.SIGKILL
    assert other.poll() is None
    assert not os.path.exists(dog.folder)
    other.kill()
    other.wait()


def test_a_folders_name_is_short_enough_for_paths_of_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 50)
    deep.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(deep))
    folder = private_folder()
    os.rmdir(folder)
    assert len(folder) <= 36


def test_rays_token_is_readable_by_its_owner_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    token = tmp_path / ".ray" / "auth_token"
    ray_cluster.keep_token_private()
    first = token.read_text()
    assert len(first) >= 32
    token.chmod(0o644)
    ray_cluster.keep_token_private()
    assert (stat.S_IMODE(token.stat().st_mode), token.read_text()) == (0o600, first)


@pytest.mark.slow
def test_other_users_can_neither_read_rays_files_nor_call_ray(ray_session: None) -> None:
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    private = session.parents[1]
    assert stat.S_IMODE(private.stat().st_mode) == 0o700 and private.stat().st_uid == os.getuid()
    program = (
        "import sys; from ray._raylet import GcsClient\n"
        "print(len(GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None, timeout=5)), 'keys')\n"
    )
    answers = [
        subprocess.run(
            [sys.executable, "-c", program, ray.get_runtime_context().gcs_address],
            env={**os.environ, "RAY_AUTH_MODE": "token", **token}, capture_output=True, text=True, timeout=60,
        )
        for token in ({"RAY_AUTH_TOKEN": "guess" * 8}, {})
    ]  # fmt: skip
    assert "keys" not in answers[0].stdout and "uthent" in answers[0].stderr, answers[0]
    assert "keys" in answers[1].stdout, answers[1]


@pytest.mark.slow
@pytest.mark.fault
def test_nothing_is_left_of_ray_when_its_program_is_killed() -> None:
    program = (
        "import ray, time\n"
        "from skyasync.run import ray_cluster\n"
        "ray_cluster.start_on_loopback(num_cpus=1, object_store_memory=1 << 27)\n"
        "print(ray_cluster._watchdog.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    folder = started.stdout.readline().strip()
    processes = _family(started.pid)
    agents = [
        each for each in processes if b"Agent" in leftovers._read(Path(f"/proc/{each}/cmdline"))
    ]
    assert len(agents) == 2
    for process in processes:  # as on a machine that is too busy for them to see the program's end
        if process not in (started.pid, *agents):
            os.kill(process, signal.SIGSTOP)
    started.kill()
    started.wait()
    until(lambda: not any(map(leftovers.is_running, processes)) and not os.path.exists(folder), 30)


def _family(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [
        process,
        *(
            each
            for task in tasks
            for child in task.read_text().split()
            for each in _family(int(child))
        ),
    ]
