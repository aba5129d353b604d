from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyasync.inference.backends.vllm.process_guard import (
    PLACE,
    VARIABLE,
    ProcessGuard,
    guarded,
    short_folder,
)


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as folder:
        yield Path(folder)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


def test_closing_kills_what_was_started_under_the_mark_and_nothing_else() -> None:
    guard = ProcessGuard()
    before = sleeper()
    with guard.marking():
        inside = sleeper()
    after = sleeper()
    assert VARIABLE not in os.environ
    guard.close()
    guard.close()  # safe to call twice
    assert inside.wait(timeout=10) == -signal.SIGKILL
    assert before.poll() is after.poll() is None
    for process in (before, after):
        process.kill()
        process.wait()


def test_grandchildren_of_a_killed_parent_die_with_it() -> None:
    program = (
        "import subprocess, time\n"
        "from skyasync.inference.backends.vllm.process_guard import ProcessGuard\n"
        "guard = ProcessGuard()\n"
        "with guard.marking():\n"
        "    subprocess.Popen(['sh', '-c', 'sleep 600 & wait'])\n"
        "print(guard.mark, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    mark = parent.stdout.readline().decode().strip()
    deadline = time.monotonic() + 30
    while not guarded(mark):  # a starting process shows its environment only after its exec
        assert time.monotonic() < deadline
    parent.kill()
    # No process inherits this end of the pipe, so the read returns when the last of them has ended.
    assert parent.stdout.read() == b""
    parent.wait()
    assert guarded(mark) == []


def test_two_guards_do_not_touch_each_others_processes() -> None:
    first, second = ProcessGuard(), ProcessGuard()
    with first.marking():
        of_first = sleeper()
    with second.marking():
        of_second = sleeper()
    first.close()
    assert of_first.wait(timeout=10) == -signal.SIGKILL
    assert of_second.poll() is None
    second.close()
    assert of_second.wait(timeout=10) == -signal.SIGKILL


def test_shared_memory_of_the_guarded_is_removed_after_them() -> None:
    program = (
        "from multiprocessing import resource_tracker, shared_memory\n"
        "block = shared_memory.SharedMemory(create=True, size=100)\n"
        "resource_tracker.unregister(block._name, 'shared_memory')\n"
        "print(block.name, flush=True)\n"
        "input()\n"
    )
    guard = ProcessGuard()
    with guard.marking():
        owner = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    assert owner.stdout is not None
    block = Path("/dev/shm", owner.stdout.readline().decode().strip())
    guard.note_shared_memory()
    assert block.exists()
    guard.close()
    owner.wait()
    assert not block.exists()


def test_so_are_files_of_killed_processes_that_were_not_recorded() -> None:
    name = f"/dev/shm/vllm_dist_test{os.getpid()}-tp:0-[0-1]-cpushm_0"
    program = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'w+b')\n"
        "file.truncate(4096)\n"
        "held = mmap.mmap(file.fileno(), 4096)\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    guard = ProcessGuard()
    with guard.marking():
        owner = subprocess.Popen(
            [sys.executable, "-c", program, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    assert owner.stdout is not None and owner.stdout.readline()
    guard.close()
    owner.wait()
    assert not Path(name).exists()


def test_files_of_the_guarded_lie_in_a_folder_that_goes_with_them(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(short_path))
    before = dict(os.environ)
    program = (
        "import os, socket, tempfile\n"
        "socket.socket(socket.AF_UNIX).bind(os.environ['VLLM_RPC_BASE_PATH'] + '/' + 36 * 'a')\n"
        "tempfile.mkstemp()\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    guard = ProcessGuard()
    with guard.marking():
        assert os.environ["VLLM_RPC_BASE_PATH"] == guard.folder, (
            "this process binds some of the sockets itself"
        )
        owner = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    assert dict(os.environ) == before and tempfile.gettempdir() != guard.folder
    assert owner.stdout is not None and owner.stdout.readline()
    assert len(os.listdir(guard.folder)) == 2 and os.listdir(short_path) == [
        Path(guard.folder).name
    ]
    assert stat.S_IMODE(os.stat(guard.folder).st_mode) == 0o700
    guard.close()
    owner.wait()
    assert os.listdir(short_path) == []


def test_the_name_of_that_folder_is_short_enough_for_paths_of_sockets(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    deep, run = short_path / ("x" * 50), short_path / "y"
    deep.mkdir()
    run.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(deep))
    monkeypatch.setenv(PLACE, str(run))
    folders = [short_folder(), short_folder()]
    assert (
        all(len(f"{folder}/{uuid.uuid4()}") <= 107 for folder in folders) and len(set(folders)) == 2
    )
    assert {Path(folder).parent for folder in folders} == {run}
    for folder in folders:
        os.rmdir(folder)
