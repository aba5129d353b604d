"""The program that runs a model's code: ``python -I -S sandbox_program.py``.

It imports nothing of this library.

Invariant: before the first line of that code runs, this process has given up for good all access to
things outside of it. Landlock lets it read only the files that the task names. Seccomp lets it make
only the system calls of ``ALLOWED``: none of them opens a file for writing, a socket or a pipe,
starts a process, or signals another one. The code can compute, and nothing else.

It reads one task, a JSON object, from its input. To its original output it writes the line
``confined``, and then a line of JSON per test. The reader takes each line for data: the code can
write there too. It holds no expected value.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import resource
import signal
import struct
import sys
import threading

TYPE_CHECKING = False  # without typing, which takes longer to import than the rest
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522

# Landlock: the system calls have these numbers on every architecture.
LANDLOCK_CREATE = 444
LANDLOCK_ADD = 445
LANDLOCK_RESTRICT = 446
LANDLOCK_VERSION = 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # rights that exist, by version; 16 from version 5 on
TCP = 0b11  # bind and connect; handled from version 4 on
SCOPES = 0b11  # abstract Unix sockets and signals; handled from version 6 on

# Seccomp: instructions of the kernel's packet filter (linux/filter.h).
LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_FROM = 0x35  # greater or equal
JUMP_ANY = 0x45  # any of these bits
RETURN = 0x06
# Its results (linux/seccomp.h).
ALLOW = 0x7FFF0000
ERROR = 0x00050000  # and the error's number in the lower half
KILL = 0x80000000
# Offsets of a call's data, in bytes: the number, the architecture, six arguments of 8 bytes.
NUMBER = 0
ARCHITECTURE = 4
ARGUMENTS = 16
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
OTHER_NUMBERS = 0x40000000  # from here on the same calls by other numbers (the x32 ABI)

#: Numbers of the allowed system calls: x86_64, aarch64 (None: it has no such call).
ALLOWED: dict[str, tuple[int, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "lseek": (8, 62),
    "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "getcwd": (79, 17),
    "getdents64": (217, 61), "fadvise64": (221, 223),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
    "setitimer": (38, 103), "getitimer": (36, 102), "alarm": (37, None), "restart_syscall": (219, 128),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "sysinfo": (99, 179), "uname": (63, 160), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getrlimit": (97, 163),
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "poll": (7, None), "ppoll": (271, 73), "select": (23, None),
    "pselect6": (270, 72), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
#: Calls that are allowed with some values of one argument: the call's numbers, the argument's
#: index, and the values of its lower half.
ALLOWED_WITH: dict[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    # Exactly a thread, as glibc and musl start one.
    "clone": ((56, 220), 0, (0x3D0F00, 0x7D0F00)),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC.
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 1030)),
    # TCGETS, TIOCGWINSZ, FIONCLEX, FIOCLEX.
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x5450, 0x5451)),
    # Hints and MADV_DONTNEED, none that needs a right.
    "madvise": ((28, 233), 2, (0, 1, 2, 3, 4, 8, 14, 15)),
}
#: Calls that open a file: numbers, and the index of the argument with the flags.
OPEN: dict[str, tuple[int, int | None, int]] = {
    "open": (2, None, 1),
    "openat": (257, 56, 2),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Names that a check uses: the list of values, and the functions that compare.
VALUES = "__values__"
EQUAL = "__equal__"
CONTAINS = "__contains__"
#: Other types of values that a test may compare, and their modules.
OTHER_TYPES = {
    "range": "builtins",
    "deque": "collections",
    "Decimal": "decimal",
    "Fraction": "fractions",
}
OTHER_TYPES |= dict.fromkeys(("Counter", "OrderedDict", "defaultdict"), "collections")
OTHER_TYPES |= dict.fromkeys(("date", "time", "datetime", "timedelta"), "datetime")
DICTIONARIES = ("Counter", "OrderedDict", "defaultdict")
# Numbers of calls with rules of their own, by architecture.
TGKILL = (234, 131)
PRLIMIT = (302, 261)
CLONE3 = 435  # on both


def main() -> None:
    task = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "wb")
    # What the code prints must not mix with the answers: its input and output are the null device,
    # as is the standard error that this process was started with.
    os.dup2(2, 0)
    os.dup2(2, 1)
    try:
        limit(task["memory_mb"], task["seconds"])
        if task["readable"] is not None:
            hide_files(task["readable"])
        if task["filter_calls"]:
            filter_calls()
    except OSError as error:
        answers.write(f"{error.strerror or error}\n".encode())
        return answers.close()
    answers.write(b"confined\n")
    answers.flush()
    sys.path += task["packages"]
    os.environ.clear()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # many tests run at once
    for answer in run(task):
        answers.write(answer.encode() + b"\n")
        answers.flush()
    os._exit(0)  # without exit handlers and threads of the code


def limit(memory_mb: int, seconds: float) -> None:
    """Set bounds of memory, time and files, and give up all rights of root."""
    size = memory_mb << 20
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        library.prctl(PR_SET_DUMPABLE, 0)  # no other process of the user can read its memory
        library.capset(struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24))
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    cpu = max(1, round(seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def hide_files(readable: list[str]) -> None:
    """Let this process open only these files, and files below these folders, for reading."""
    library = ctypes.CDLL(None, use_errno=True)
    version = library.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), LANDLOCK_VERSION)
    if version < 1:
        raise OSError(
            errno.ENOSYS,
            "this kernel has no Landlock (Linux 5.13 and later have it, where it is enabled)",
        )
    # Every right that is handled is refused unless a rule grants it.
    files = (1 << FILE_RIGHTS.get(version, 16)) - 1
    handled = struct.pack("=Q", files)
    if version >= 4:
        handled += struct.pack("=Q", TCP)
    if version >= 6:
        handled += struct.pack("=Q", SCOPES)
    rules = library.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "this kernel refuses Landlock")
    for path in readable:
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # a system without it
        rights = READ_FILE
        if os.path.isdir(path):
            rights |= READ_DIR
        library.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, file), 0)
        os.close(file)
    library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if library.syscall(LANDLOCK_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "this kernel refuses Landlock")
    os.close(rules)


def filter_calls() -> None:
    """Have the kernel refuse every other system call, with "operation not permitted"."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise OSError(
            errno.ENOSYS, "system calls are filtered on Linux with x86_64 or aarch64 only"
        )
    program = b"".join(instructions(machine, os.getpid()))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    buffer = ctypes.create_string_buffer(program, len(program))
    library = ctypes.CDLL(None, use_errno=True)
    filter_program = Filter(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    # Without privileges for a new program the kernel lets any process install a filter.
    failed = library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    failed = failed or library.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0
    )
    if failed:
        raise OSError(ctypes.get_errno(), "this kernel has no seccomp")


def instructions(machine: str, process: int) -> Iterator[bytes]:
    """The filter's program, 8 bytes per instruction.

    Args:
        process: the number of this process, the only one that it may send a signal.
    """
    column = list(ARCHITECTURES).index(machine)  # of the tables of numbers
    refuse = instruction(RETURN, ERROR | errno.EPERM)
    allow = instruction(RETURN, ALLOW)
    # The numbers below are those of one architecture. A process can call by another one's too.
    yield instruction(LOAD, ARCHITECTURE)
    yield instruction(JUMP_EQUAL, ARCHITECTURES[machine], yes=1)
    yield instruction(RETURN, KILL)
    yield instruction(LOAD, NUMBER)
    yield instruction(JUMP_FROM, OTHER_NUMBERS, no=1)
    yield refuse
    for allowed in ALLOWED.values():
        number = allowed[column]
        if number is not None:
            yield from if_called(number, [allow])
    # As if the kernel had no clone3, whose arguments a filter cannot see: libraries then use clone.
    yield from if_called(CLONE3, [instruction(RETURN, ERROR | errno.ENOSYS)])
    for numbers, argument, values in ALLOWED_WITH.values():
        offset = ARGUMENTS + 8 * argument
        yield from if_called(numbers[column], [*unless_equal(offset, values, refuse), allow])
    yield from if_called(TGKILL[column], [*unless_equal(ARGUMENTS, (process,), refuse), allow])
    # prlimit of this process (0) without an address of new limits, both of whose halves are zero:
    # it reads the old limits.
    new_limits = ARGUMENTS + 8 * 2
    block: list[bytes] = []
    for offset in (ARGUMENTS, new_limits, new_limits + 4):
        block += unless_equal(offset, (0,), refuse)
    yield from if_called(PRLIMIT[column], [*block, allow])
    for *numbers_of_open, argument in OPEN.values():
        number = numbers_of_open[column]
        if number is not None:
            block = [
                instruction(LOAD, ARGUMENTS + 8 * argument),
                instruction(JUMP_ANY, WRITING, no=1),
                refuse,
                allow,
            ]
            yield from if_called(number, block)
    yield refuse


def instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; ``yes`` and ``no``: how many to skip after a comparison."""
    return struct.pack("=HBBI", code, yes, no, value & 0xFFFFFFFF)


def if_called(number: int, block: list[bytes]) -> Iterator[bytes]:
    """Run the block, which ends with a result, for this system call."""
    yield instruction(JUMP_EQUAL, number, no=len(block))
    yield from block


def unless_equal(offset: int, values: tuple[int, ...], refuse: bytes) -> list[bytes]:
    """Refuse the call unless the word at this offset has one of these values."""
    block = [instruction(LOAD, offset)]
    for index, value in enumerate(values):
        # Past the other values and the refusal.
        block.append(instruction(JUMP_EQUAL, value, yes=len(values) - index))
    block.append(refuse)
    return block


def run(task: dict[str, Any]) -> Iterator[str]:
    """The answer to each test, as JSON: the printed or returned value, or the error.

    It is compared in another process.
    """
    try:
        code = compile(task["code"], "<response>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        answer = json.dumps({"error": described(error)})
        for _ in task["tests"]:
            yield answer
        return
    for test in task["tests"]:
        yield play(code, test, task["seconds_per_test"])


def described(error: BaseException) -> str:
    """An error's type and message, of at most 500 characters: the code may choose the message."""
    return f"{type(error).__name__}: {error}"[:500]


class Printed(io.BytesIO):
    """The output of a program, which can be read after the program has closed it."""

    def close(self) -> None:
        pass


def play(code: CodeType, test: dict[str, Any], seconds: float) -> str:
    """Run one test in a new module; returns its answer as JSON."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module  # the code may look for itself there, as dataclasses do
    names: dict[str, Any] = module.__dict__
    names |= {"exit": sys.exit, "quit": sys.exit, "open": opened}
    threads_at_start = threading.enumerate()
    stdin = test.get("stdin", "").encode("utf-8", "replace")
    printed = Printed()
    output = io.TextIOWrapper(printed, "utf-8", "replace", newline="\n")
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    sys.stdout = output
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        answer: dict[str, Any] = {}
        try:
            exec(code, names)  # this is what the sandbox is for
        except SystemExit:
            if "stdin" not in test:
                raise
        except BaseException as error:
            if "stdin" not in test:
                raise
            # A program's output may be complete all the same.
            answer["error"] = described(error)
        if "call" in test:
            name = test["call"]
            if name in names:
                function = names[name]
            else:  # a method, as in LeetCode's problems
                function = getattr(names["Solution"](), name)
            answer["returned"] = function(*test["arguments"])
        elif "steps" in test:
            answer["values"] = []
            for kind, source in test["steps"]:
                step = compile(source, "<test>", "eval" if kind == "value" else "exec")
                if kind == "value":
                    answer["values"].append(plain(eval(step, names)))
                else:
                    exec(step, names)
        elif "check" in test:
            names[VALUES] = [from_plain(value) for value in test["values"]]
            names |= {EQUAL: equal, CONTAINS: contains}
            exec(compile(test["check"], "<test>", "exec"), names)
            answer["passed"] = True
        else:
            join_threads(threads_at_start)
            output.flush()
            answer["printed"] = printed.getvalue().decode("utf-8", "replace")
        return json.dumps(answer, default=listed)
    except BaseException as error:
        return json.dumps({"error": described(error)})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def join_threads(threads_at_start: list[threading.Thread]) -> None:
    """Wait for the code's threads, as Python does at a program's end."""
    while True:
        running = []  # a thread may have started another one
        for thread in threading.enumerate():
            # An executor's threads only wait for work when the others have ended.
            is_idle = thread.daemon or thread.name.startswith("ThreadPoolExecutor")
            if thread not in threads_at_start and not is_idle:
                running.append(thread)
        if not running:
            return
        running[0].join()


def listed(value: object) -> object:
    """A value that JSON lacks: arrays as lists, any other as text."""
    return getattr(value, "tolist", value.__repr__)()


def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
    """``open``, for which standard input is the test's."""
    if file in (0, "/dev/stdin"):
        if "b" in mode:
            return sys.stdin.buffer
        return sys.stdin
    return open(file, mode, *arguments, **options)


def plain(value: object) -> object:
    """A value as JSON that tells its types apart; subclasses and arrays by their content.

    Raises:
        TypeError: for a value of any other type than a test compares.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [plain(item) for item in value]}
    name = type(value).__name__
    if hasattr(value, "__next__") or name in ("dict_keys", "dict_values", "dict_items"):
        return {"list": [plain(item) for item in value]}  # type: ignore[attr-defined]
    if name in OTHER_TYPES:
        if name == "deque":
            return {name: [plain([*value])]}  # type: ignore[misc]
        if name in DICTIONARIES:
            return {name: plain(dict(value))["dict"]}  # type: ignore[call-overload, index]
        isoformat = getattr(value, "isoformat", None)
        if isoformat:
            return {name: [plain(isoformat())]}
        # Arguments of the constructor, by which pickle would make it again.
        return {name: [plain(item) for item in value.__reduce__()[1]]}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    tolist = getattr(value, "tolist", None)
    if tolist:
        return plain(tolist())
    raise TypeError(f"a value of type {type(value).__name__} is not plain data")


def from_plain(value: object) -> object:
    """The value that ``plain`` made this of, of built-in types and ``OTHER_TYPES`` alone.

    Raises:
        ValueError, TypeError: for anything else.
    """
    if not isinstance(value, dict | list):
        return value
    if isinstance(value, list) or len(value) != 1:
        raise ValueError("no plain value")
    ((kind, items),) = value.items()
    if kind == "bytes":
        return bytes.fromhex(items)
    if kind == "complex":
        return complex(*items)
    if kind == "dict":
        return {from_plain(key): from_plain(item) for key, item in items}
    if kind in OTHER_TYPES:
        value_type = getattr(__import__(OTHER_TYPES[kind]), kind)
        if kind in DICTIONARIES:
            content = {from_plain(key): from_plain(item) for key, item in items}
            if kind == "defaultdict":
                return value_type(None, content)
            return value_type(content)
        construct = getattr(value_type, "fromisoformat", value_type)
        return construct(*map(from_plain, items))
    types: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in types:
        raise ValueError("no plain value")
    return types[kind](map(from_plain, items))


def equal(left: Any, right: Any) -> Any:  # noqa: ANN401  (arrays give arrays)
    """``left == right``, but a truth value equals no number, also in containers."""
    if left is right:
        return True
    if is_truth(left) != is_truth(right):
        result = left == right
        if isinstance(result, bool) or is_truth(result):
            return False
        return result  # an array of comparisons
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        is_same_kind = isinstance(left, list) == isinstance(right, list)
        return is_same_kind and len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        if left != right or truths(left) != truths(right):
            return False
        return all(equal(value, right[key]) for key, value in left.items())
    if isinstance(left, set | frozenset) and isinstance(right, set | frozenset):
        return left == right and truths(left) == truths(right)
    return left == right


def contains(item: Any, container: Any) -> Any:  # noqa: ANN401
    """``item in container``, by ``equal``."""
    if isinstance(container, list | tuple | set | frozenset | dict):
        return any(equal(item, member) for member in container)
    return item in container


def is_truth(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy's


def truths(items: Any) -> int:  # noqa: ANN401
    """The number of truth values: {1, 2} equals {True, 2} in Python."""
    return sum(map(is_truth, items))


def late(*_: object) -> None:
    raise TimeoutError("the test took too long")


if __name__ == "__main__":
    main()
