"""What runs a model's code: a program of its own (``python -I sandbox.py``), which imports nothing of this library.

Invariant: before the first line of that code runs, this process has given up for good (seccomp, on Linux) whatever
reaches beyond it: sockets, other processes, signals to them, and every change of a file. Memory and CPU time are
limited, the environment is empty, and the process dies with the one that started it. What is left is to compute, and to
read.

It reads one JSON object from its input, and writes a line of JSON for each test to what was its output.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
LOAD, JUMP_EQ, JUMP_FROM, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of the kernel's packet filter
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # where the filter finds them
CLONE_THREAD = 0x00010000
OTHER_NUMBERS = 0x40000000  # from here on the same calls by other numbers (x32)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

#: System calls by architecture: what the kernel calls it, and the numbers.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {
    "x86_64": {
        "network": (41, 42, 43, 44, 46, 49, 50, 53, 288),
        "processes": (57, 58, 59, 322, 62, 101, 200, 234, 310, 311, 424, 434, 438),
        "files": (76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 133, 155, 161, 165, 166, 188, 189, 190, 235,
                  258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 316, 437),
        "the kernel": (105, 106, 113, 114, 117, 119, 122, 123, 126, 160, 175, 176, 246, 248, 249, 250, 272, 298, 302,
                       304, 308, 313, 320, 321, 425, 426, 427),
    },
    "aarch64": {
        "network": (198, 199, 200, 201, 202, 203, 206, 211, 242),
        "processes": (221, 281, 117, 129, 130, 131, 270, 271, 424, 434, 438),
        "files": (5, 6, 7, 33, 34, 35, 36, 37, 38, 39, 40, 41, 45, 46, 48, 51, 52, 53, 54, 55, 276, 437),
        "the kernel": (97, 105, 106, 142, 143, 144, 146, 147, 149, 151, 152, 154, 164, 217, 218, 219, 241, 261, 265,
                       268, 273, 280, 294, 425, 426, 427),
    },
}  # fmt: skip
OPEN = {"x86_64": 2, "aarch64": -1}
OPENAT = {"x86_64": 257, "aarch64": 56}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435


def main() -> None:
    task = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    limit(task["memory_mb"], task["seconds"])
    confine()
    for answer in run(task):
        answers.write(json.dumps(answer, default=repr) + "\n")
        answers.flush()


def limit(memory_mb: int, seconds: float) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    size = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (max(1, round(seconds)), max(1, round(seconds)) + 1))
    for zero in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(zero, (0, 0))


def confine() -> None:
    """From here on the kernel refuses what ``REFUSED`` names, with "operation not permitted"."""
    machine = platform.machine()
    program = b"".join(instructions(machine))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    kept = ctypes.create_string_buffer(program, len(program))
    library = ctypes.CDLL(None, use_errno=True)
    given = Filter(len(program) // 8, ctypes.cast(kept, ctypes.c_void_p))
    if library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or library.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "this kernel does not confine a process (seccomp)")


def instructions(machine: str) -> Iterator[bytes]:
    """The filter: one architecture, its refused calls, no new processes, no file opened to be written."""
    refusal, missing = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS

    def say(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value & 0xFFFFFFFF)

    yield say(LOAD, ARCHITECTURE)
    yield say(JUMP_EQ, ARCHITECTURES[machine], yes=1)
    yield say(RETURN, KILL)
    yield say(LOAD, NUMBER)
    yield say(JUMP_FROM, OTHER_NUMBERS, no=1)
    yield say(RETURN, refusal)
    for number in sorted(number for numbers in REFUSED[machine].values() for number in numbers):
        yield say(JUMP_EQ, number, no=1)
        yield say(RETURN, refusal)
    yield say(JUMP_EQ, CLONE3, no=1)  # its flags lie in memory that a filter cannot read: libraries then use clone
    yield say(RETURN, missing)
    for number, argument, flags, wanted in (
        (OPEN[machine], 1, WRITING, False),
        (OPENAT[machine], 2, WRITING, False),
        (CLONE[machine], 0, CLONE_THREAD, True),
    ):
        if number < 0:
            continue
        yield say(JUMP_EQ, number, no=4)
        yield say(LOAD, ARGUMENTS + 8 * argument)
        yield say(JUMP_SET, flags, yes=int(wanted), no=int(not wanted))
        yield say(RETURN, refusal)
        yield say(RETURN, ALLOW)
    yield say(RETURN, ALLOW)


def run(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each test gives: what was printed or returned, or the error. It is compared elsewhere."""
    try:
        code = compile(task["code"], "<response>", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        yield from ({"error": f"{type(error).__name__}: {error}"} for _ in task["tests"])
        return
    for test in task["tests"]:
        yield play(code, test, task["seconds_per_test"])


def play(code: CodeType, test: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One test in names of its own."""
    names: dict[str, Any] = {"__name__": "__main__"}
    sys.stdin, sys.stdout = io.StringIO(test.get("stdin", "")), io.StringIO()
    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    answer: dict[str, Any] = {}
    try:
        try:
            exec(code, names)  # this is what the sandbox is for
        except SystemExit:
            if "stdin" not in test:
                raise
        if "call" in test:
            answer["returned"] = _called(names, test["call"])(*test["arguments"])
        elif "check" in test:
            exec(compile(test["check"], "<test>", "exec"), names)
            answer["passed"] = test["token"]
    except BaseException as error:
        answer["error"] = f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return answer | ({"printed": sys.stdout.getvalue()} if "stdin" in test else {})


def _called(names: dict[str, Any], name: str) -> Callable[..., object]:
    """A function, or a method of the class ``Solution``."""
    found: Callable[..., object] = names[name] if name in names else getattr(names["Solution"](), name)
    return found


def _late(*_: object) -> None:
    raise TimeoutError("the test took too long")


if __name__ == "__main__":
    main()
