"""The sandbox of a model's code: a process that the kernel confines, or a server.

Invariant: the code's process holds no expected value and no secret, and its output is data. It is
read up to a bound and parsed as JSON, and no object of the code takes part in a comparison. Invalid
output, a crash and a reached limit have the same outcome: fewer answers. When ``run`` returns, the
process and its descendants are gone.

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
MEMORY_MB = 1024  # of address space, so that a response cannot fill the memory of the machine
MOST_THREADS = 64  # of the process and its descendants, many times what a test needs
START_S = 10.0  # for Python and its confinement, before the code has begun
LOOK_S = 0.05  # between two looks at the process
DEEPEST = 200  # levels of an answer's JSON: comparison is recursive, and Python's limit is 1000
SLACK = 1 << 20  # bytes of answers beyond those of right ones, for what the code prints in addition
PROGRAM = Path(sandbox_program.__file__)
PACKAGES = list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
_LIBRARIES += [str(Path(sys.base_prefix, name)) for name in ("lib", sys.platlibdir)]
_SYSTEM = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
#: Files that the code may read: Python, installed packages, and the system's libraries.
READABLE = list(dict.fromkeys([*_LIBRARIES, *PACKAGES, *_SYSTEM]))

Test = dict[str, Any]  # a request of ``sandbox_program``
Answer = dict[str, Any]


@cache
def choose(where: str) -> str:
    """The backend that ``environment.code_sandbox`` names; for ``auto`` the first that works here.

    Raises:
        UserError: if that backend, or with ``auto`` every backend, does not work.
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
    """The reason why a trivial program does not run there; "" if it does."""
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
    tests: Sequence[Test],
    sizes: Sequence[int],
    seconds: float,
    seconds_per_test: float,
) -> list[Answer]:
    """Run the tests of a program; returns an answer for each.

    There are fewer answers than tests if the process was ended, or ended itself, before the last.

    Args:
        where: ``environment.code_sandbox``.
        tests: the requests, without expected values.
        sizes: bytes that a right answer to each takes at most. A longer answer is an error.
        seconds: time limit of all tests.
        seconds_per_test: time limit of each.

    Raises:
        TransientError: if the sandbox itself fails for any code.
    """
    try:
        name = choose("auto") if where == "auto" else where
    except UserError as error:  # it worked before the run: another try may succeed
        raise TransientError(str(error)) from error
    try:
        return _answers(name, code, tests, sizes, seconds, seconds_per_test)
    except TransientError:
        if not is_remote(name) or _problem(name):
            raise
        return []  # the server works: it failed because of this program


def _answers(
    where: str,
    code: str,
    tests: Sequence[Test],
    sizes: Sequence[int],
    seconds: float,
    seconds_per_test: float,
) -> list[Answer]:
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
    max_bytes = sum(sizes) + SLACK
    if is_remote(where):
        output = _from_server(where, task, max_bytes, seconds)
    else:
        output = _from_process(_command(where), task, max_bytes, len(tests) + 1, seconds)
    header, *lines = output.split(b"\n")
    if header != b"confined":
        problem = header.decode("utf-8", "replace")[:200]
        raise TransientError(
            f"the sandbox of the model's code ({where}) did not start: {problem or 'it gave nothing'}"
        )
    # Without the text after the last newline: the process may have been ended within a line.
    complete_lines = lines[:-1]
    return [_answer(line, size) for line, size in zip(complete_lines, sizes, strict=False)]


def _answer(line: bytes, size: int) -> Answer:
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
        next_level: list[object] = []
        for item in level:
            if isinstance(item, dict):
                next_level += item.values()
            elif isinstance(item, list):
                next_level += item
        level = next_level
    return bool(level)


def _command(backend: str) -> list[str]:
    """The command of ``sandbox_program``; for bubblewrap in a file system with nothing else."""
    # Not the link in a virtual environment, which only works next to its pyvenv.cfg.
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    # -I and -S: isolated from the user's and the run's environment. -B: no files are written.
    program = [python, "-I", "-S", "-B", "-X", "utf8", str(PROGRAM)]
    if backend != "bubblewrap":
        return program
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise TransientError("it is not installed")
    command = [bubblewrap, "--unshare-all", "--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL"]
    for path in (*READABLE, python, str(PROGRAM)):
        command += ["--ro-bind-try", path, path]
    # After the mounts, which need a writable root.
    command += ["--remount-ro", "/", "--chdir", "/", "--"]
    return command + program


def _from_process(
    command: list[str], task: str, max_bytes: int, lines: int, seconds: float
) -> bytes:
    """The process's output until it has so many lines, too many bytes, or the time is over.

    The time counts from the first line on. Afterwards the process and its descendants are ended.
    """
    try:
        with tempfile.TemporaryFile() as input_file:
            input_file.write(task.encode())
            input_file.seek(0)
            process = subprocess.Popen(
                command,
                stdin=input_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        raise TransientError(f"the code's sandbox did not start: {error}") from error
    output = bytearray()
    missing_lines = lines
    deadline = time.monotonic() + START_S
    with process, selectors.DefaultSelector() as selector:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        selector.register(pipe, selectors.EVENT_READ)
        try:
            next_look = 0.0
            while missing_lines > 0 and len(output) <= max_bytes:
                now = time.monotonic()
                if now >= deadline:
                    break
                if now >= next_look:
                    if _threads(process.pid) > MOST_THREADS:
                        break
                    next_look = now + LOOK_S
                if selector.select(min(LOOK_S, deadline - now)):
                    chunk = os.read(pipe, 1 << 16)
                    if not chunk:  # the process has closed its output
                        break
                    if missing_lines == lines and b"\n" in chunk:
                        deadline = time.monotonic() + seconds  # the first line: the code begins
                    output += chunk
                    missing_lines -= chunk.count(b"\n")
        finally:
            # Suppressed: the only process of the group has ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # Processes inside bubblewrap have no number here. They hold the pipe until they end.
            deadline = time.monotonic() + 5.0
            while time.monotonic() < deadline:
                if selector.select(LOOK_S) and not os.read(pipe, 1 << 16):
                    break
    return bytes(output)


def _threads(process: int) -> int:
    """The number of threads of a process and its descendants; 0 if it has ended.

    The kernel's own limit of processes (RLIMIT_NPROC) does not apply to root.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
        # Fields follow the program's name, which is in parentheses and may have spaces.
        count = int(stat.rpartition(")")[2].split()[17])
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (OSError, ValueError):
        return 0
    for child in children:
        count += _threads(int(child))
    return count


def _from_server(url: str, task: str, max_bytes: int, seconds: float) -> bytes:
    """The output of ``sandbox_program`` on a server, which gets no expected value."""
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
    largest = 6 * max_bytes + SLACK  # as JSON in JSON
    try:
        # The server's own limit comes first, and its answer tells more than a timeout.
        with urllib.request.urlopen(request, timeout=seconds + 2.0) as response:
            content = response.read(largest + 1)
        if len(content) > largest:
            return b"confined\n"  # no answers: the program wrote too much
        result = json.loads(content)
        if result["status"] == "SandboxError":
            raise ValueError(str(result.get("message"))[:200])
        return str(result["run_result"]["stdout"]).encode("utf-8", "replace")[:max_bytes]
    except (OSError, HTTPException, ValueError, TypeError, KeyError, RecursionError) as error:
        raise TransientError(
            f"the code's sandbox {url}: {type(error).__name__}: {error}"
        ) from error
