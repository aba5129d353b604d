"""Where a model's code runs: a process that the kernel confines, or a server.

Invariant: the code's process holds no expected value and no secret, and what it writes is data. It
is read up to a bound and parsed as JSON, and no object of the code takes part in a comparison.
Noise, a crash and a passed limit are all one outcome: fewer answers. When ``run`` returns, the
process and all that it started are gone.

| backend        | what the code can read              | what else holds                                            |
|----------------|-------------------------------------|------------------------------------------------------------|
| ``bubblewrap`` | Python, its packages, the system's  | namespaces (users, processes, network, IPC, mounts); the   |
|                | libraries: there are no other files | system calls are filtered                                  |
| ``landlock``   | the same: it can open no others     | the system calls are filtered                              |
| ``seccomp``    | what the run can                    | the system calls are filtered                              |
| ``none``       | what the run can                    | limits alone: the code can do what the user can            |
| ``http://...`` | what the server lets it             | the server's own walls (SandboxFusion's ``/run_code``)     |
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

from skyasync.errors import TransientError, UserError
from skyasync.rewards import is_remote, sandbox_program

AUTOMATIC = ("bubblewrap", "landlock")  # in order; the others are for the user to choose
MEMORY_MB = 1024
MOST_THREADS = 64
START_S = 10.0  # for Python and its walls, before the code has begun
LOOK_S = 0.05  # between two looks at the process
DEEPEST = 200  # levels of an answer's JSON
SLACK = 1 << 20  # bytes of answers beyond those that right ones take
PROGRAM = Path(sandbox_program.__file__)
PACKAGES = list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
_LIBRARIES += [str(Path(sys.base_prefix, name)) for name in ("lib", sys.platlibdir)]
_SYSTEM = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
#: What the code may read: Python, installed packages, and what a program that computes needs of the system.
READABLE = list(dict.fromkeys([*_LIBRARIES, *PACKAGES, *_SYSTEM]))

Answers = list[dict[str, Any]]


@cache
def choose(where: str) -> str:
    """The backend that ``environment.code_sandbox`` names; for ``auto`` the first that works here.

    Raises:
        UserError: if it does not work, or none does.
    """
    if where != "auto":
        problem = _problem(where)
        if problem:
            raise UserError(f"environment.code_sandbox={where} does not work here: {problem}")
        return where
    problems = []
    for backend in AUTOMATIC:
        problem = _problem(backend)
        if not problem:
            return backend
        problems.append(f"{backend}: {problem}")
    raise UserError(
        f"reward function code_tests runs code that the model writes, and nothing here confines it "
        f"({'; '.join(problems)}): install bubblewrap, name a SandboxFusion server "
        "(environment.code_sandbox=http://HOST:PORT), or accept less: environment.code_sandbox=seccomp (the code can "
        "read your files) or none (it can do what you can)"
    )


def _problem(where: str) -> str:
    """Why a trivial program does not run there; "" if it does."""
    try:
        answers = _answers(
            where, "print(6 * 7)", [{"stdin": ""}], [0], seconds=10.0, seconds_per_test=10.0
        )
    except TransientError as error:
        return str(error)
    if answers == [{"printed": "42\n"}]:
        return ""
    return f"a program that prints 42 gave {answers}"


def run(
    where: str,
    code: str,
    tests: Sequence[dict[str, Any]],
    sizes: Sequence[int],
    seconds: float,
    seconds_per_test: float,
) -> Answers:
    """What each test gives; fewer answers than tests if the process was ended, or ended itself,
    before the last.

    Args:
        where: ``environment.code_sandbox``.
        tests: what is run, without what is expected.
        sizes: bytes that a right answer to each takes at most. A longer one is not looked at.

    Raises:
        TransientError: if the sandbox itself fails, whatever the code is.
    """
    try:
        name = choose("auto") if where == "auto" else where
    except UserError as error:  # the run has begun, where it worked
        raise TransientError(str(error)) from error
    try:
        return _answers(name, code, tests, sizes, seconds, seconds_per_test)
    except TransientError:
        if not is_remote(name) or _problem(name):
            raise
        return []  # the server works: it was this program that it failed at


def _answers(
    where: str,
    code: str,
    tests: Sequence[dict[str, Any]],
    sizes: Sequence[int],
    seconds: float,
    seconds_per_test: float,
) -> Answers:
    task = json.dumps(
        {
            "code": code,
            "tests": list(tests),
            "seconds": seconds,
            "seconds_per_test": seconds_per_test,
            "memory_mb": MEMORY_MB,
            "readable": READABLE if where == "landlock" else None,
            "filter_calls": where in ("bubblewrap", "landlock", "seccomp"),
            "packages": [] if is_remote(where) else PACKAGES,
        }
    )
    most = sum(sizes) + SLACK
    if is_remote(where):
        output = _from_server(where, task, most, seconds)
    else:
        output = _from_process(_command(where), task, most, len(tests) + 1, seconds)
    first, *lines = output.split(b"\n")
    if first != b"confined":
        problem = first.decode("utf-8", "replace")[:200]
        raise TransientError(
            f"the sandbox of the model's code ({where}) did not start: {problem or 'it gave nothing'}"
        )
    whole = lines[:-1]  # what follows the last line's end is no line
    return [_answer(line, size) for line, size in zip(whole, sizes, strict=False)]


def _answer(line: bytes, size: int) -> dict[str, Any]:
    """One line of output as data: the code may have written it."""
    if len(line) > size + SLACK:
        return {"error": f"an answer of {len(line)} bytes"}
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {"error": f"no answer: {error}"}
    if not isinstance(answer, dict):
        return {"error": "no answer"}
    if is_deep(answer):
        return {"error": "too deep an answer"}
    return answer


def is_deep(value: object) -> bool:
    """Whether it has more than ``DEEPEST`` levels of JSON's lists and objects."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for each in level
            if isinstance(each, list | dict)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def _command(backend: str) -> list[str]:
    """Python without its environment and the run's; for bubblewrap inside of a file system that has
    nothing else."""
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]  # outside of a virtual environment
    program = [python, "-I", "-S", "-B", "-X", "utf8", str(PROGRAM)]
    if backend != "bubblewrap":
        return program
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise TransientError("it is not installed")
    seen = [
        word for path in (*READABLE, python, str(PROGRAM)) for word in ("--ro-bind-try", path, path)
    ]
    walls = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    return [bubblewrap, *walls, *seen, "--remount-ro", "/", "--chdir", "/", "--", *program]


def _from_process(command: list[str], task: str, most: int, lines: int, seconds: float) -> bytes:
    """What it writes, until that is enough, too much or too late (from its first line on); then it
    is gone."""
    try:
        with tempfile.TemporaryFile() as given:
            given.write(task.encode())
            given.seek(0)
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        raise TransientError(f"the code's sandbox did not start: {error}") from error
    output = bytearray()
    missing = lines
    deadline = time.monotonic() + START_S
    with process, selectors.DefaultSelector() as selector:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        selector.register(pipe, selectors.EVENT_READ)
        try:
            look_at = 0.0
            while missing > 0 and len(output) <= most and (now := time.monotonic()) < deadline:
                if now >= look_at:
                    if _threads(process.pid) > MOST_THREADS:
                        break
                    look_at = now + LOOK_S
                if selector.select(min(LOOK_S, deadline - now)):
                    chunk = os.read(pipe, 1 << 16)
                    if not chunk:
                        break
                    if missing == lines and b"\n" in chunk:
                        deadline = time.monotonic() + seconds
                    output += chunk
                    missing -= chunk.count(b"\n")
        finally:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # a group whose only process has ended
                os.killpg(process.pid, signal.SIGKILL)
            until = time.monotonic() + 5.0  # of the processes below bubblewrap the pipe's end tells
            while time.monotonic() < until and (
                not selector.select(LOOK_S) or os.read(pipe, 1 << 16)
            ):
                pass
    return bytes(output)


def _threads(process: int) -> int:
    """How many there are of a process and of those below it. No limit of the kernel counts them for
    root."""
    try:
        own = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[17])
        below = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (OSError, ValueError):
        return 0
    return own + sum(_threads(int(each)) for each in below)


def _from_server(url: str, task: str, most: int, seconds: float) -> bytes:
    """What the program writes there: the task is its input, so that the server has the tests'
    inputs only."""
    body = {
        "code": PROGRAM.read_text(),
        "language": "python",
        "stdin": task,
        "compile_timeout": seconds,
        "run_timeout": seconds,
        "memory_limit_MB": MEMORY_MB,
    }
    request = urllib.request.Request(
        f"{url.rstrip('/').removesuffix('/run_code')}/run_code",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    largest = 6 * most + SLACK  # as JSON in JSON
    try:
        with urllib.request.urlopen(request, timeout=seconds + 2.0) as response:
            content = response.read(largest + 1)
        if len(content) > largest:
            return b"confined\n"  # of a program that wrote too much no answer is looked at
        result = json.loads(content)
        if result["status"] == "SandboxError":
            raise ValueError(str(result.get("message"))[:200])
        return str(result["run_result"]["stdout"]).encode("utf-8", "replace")[:most]
    except (OSError, HTTPException, ValueError, TypeError, KeyError, RecursionError) as error:
        raise TransientError(
            f"the code's sandbox {url}: {type(error).__name__}: {error}"
        ) from error
