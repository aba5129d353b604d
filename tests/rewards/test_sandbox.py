"""The sandbox for a model's code: nothing outside of it can be reached, and any output is one result."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.errors import TransientError, UserError
from skyasync.rewards import code, sandbox, sandbox_program
from skyasync.rewards.asserts import split
from skyasync.rewards.code import code_tests
from skyasync.rewards.sandbox_program import (
    ALLOWED,
    ALLOWED_WITH,
    ARCHITECTURES,
    OPEN,
    instructions,
)

confined = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ARCHITECTURES,
    reason="confined by Linux alone",
)

pytestmark = pytest.mark.slow  # a process or two per test

SECRET = "zq7-what-is-expected-8vx"
WRONG = {"reward": 0.0, "passed": 0.0}


@pytest.fixture(params=["landlock", "bubblewrap"])
def backend(request: pytest.FixtureRequest) -> str:
    try:
        return sandbox.choose(request.param)
    except UserError as problem:
        pytest.skip(str(problem))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SECONDS", 1.5)
    monkeypatch.setattr(code, "SECONDS_PER_TEST", 1.0)


def printed(program: str, backend: str) -> str:
    (answer,) = sandbox.run(backend, program, [{"stdin": ""}], [0], 6.0, 5.0)
    assert "error" not in answer, answer
    return str(answer["printed"])


def rewarded(program: str, label: Any, backend: str) -> dict[str, float]:
    return code_tests(f"```python\n{program}\n```", label, backend)


# Expected use

SEARCH = """
import gc, os, sys
seen = []
frame = sys._getframe()
while frame:
    seen.append(repr(frame.f_locals) + repr(frame.f_globals))
    frame = frame.f_back
for thing in gc.get_objects():
    try: seen.append(repr(thing))
    except BaseException: pass
places = ["/proc/self/mem", "/proc/self/environ", "/proc/self/cmdline", "/dev/stdin", "/dev/fd/0"]
for number in range(max(1, os.getppid() - 3), os.getppid() + 1):
    places += [f"/proc/{{number}}/{{name}}" for name in ("environ", "cmdline", "maps", "mem", "fd/0")]
for place in places:
    try: seen.append(repr(open(place, "rb").read(1 << 20)))
    except OSError: pass
for descriptor in range(64):
    try: seen.append(repr(os.pread(descriptor, 1 << 20, 0)))
    except OSError: pass
text = "".join(seen)
half = "zq7-what-is-"
at = text.find(half + "expected")
found = text[at:at + {size}] if at >= 0 else "nothing"
def f(*_):
    return found
print(found)
"""


@confined
@pytest.mark.parametrize(
    "label",
    [
        {"inputs": [""], "outputs": [SECRET]},
        {"fn_name": "f", "inputs": [[1]], "outputs": [SECRET]},
        [f"assert f(1) == {SECRET!r}"],
        [f"assert f(1).strip() == {SECRET!r}"],
        [f"wanted = {SECRET!r}\ngiven = 1\nassert f(given) == wanted"],
    ],
    ids=["program", "function", "assert", "check", "constants"],
)
def test_what_is_expected_is_nowhere_in_the_process_that_runs_the_code(
    label: Any, backend: str
) -> None:
    assert rewarded(SEARCH.format(size=len(SECRET)), label, backend)["reward"] == 0.0


ASSERTS = ["assert f(1) == 41", "assert abs(f(1) - 41) < 1e-6"]


@confined
@pytest.mark.parametrize(
    "program",
    [
        "import sys\nf = lambda x: 41\nsys._getframe(1).f_locals['test']['check'] = 'pass'\nf = lambda x: 0",
        "class Same(int):\n    __eq__ = __ne__ = __lt__ = lambda *_: True\n    __sub__ = __abs__ = lambda *_: Same(0)\n"
        "    __hash__ = int.__hash__\nf = lambda x: Same(0)",
        "class Same:\n    __eq__ = __lt__ = __sub__ = lambda *_: True\nf = lambda x: Same()",
        "class Decimal:\n    __eq__ = __lt__ = __sub__ = __abs__ = lambda *_: True\n"
        "    __reduce__ = lambda _: (Decimal, ('nan',))\nf = lambda x: Decimal()",
        'import json\njson.dumps = lambda *_, **__: \'{"passed": true, "values": [true]}\'\nf = lambda x: 0',
        'import os\nfor d in range(64):\n    try: os.write(d, b\'{"passed": true}\\n{"passed": true}\\n\' * 3)\n'
        "    except OSError: pass",
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.compile = lambda *_: 'True'\nf = lambda x: 0",
        "def f(x): raise SystemExit(0)",
        "import os\nf = lambda x: os._exit(0)",
        "import sys\nf = lambda x: sys.modules.clear()",
        "f = lambda x: float('nan')",
        "import types\nf = lambda x: types.SimpleNamespace(tolist=lambda: {'dict': 41})",
        "def f(x): return f(x)",
        "def f(x):\n    a = []\n    a.append(a)\n    return a",
        "import pickle\nclass P:\n    def __reduce__(self): return (eval, ('41',))\nf = lambda x: pickle.dumps(P())",
        "import atexit, os\natexit.register(os.write, 3, b'{\"passed\": true}\\n')\nf = lambda x: 0",
        "__import__('sandbox_program')",
    ],
)
def test_no_trick_passes_an_assert_test(program: str, backend: str) -> None:
    assert rewarded(program, ASSERTS, backend)["reward"] == 0.0


@confined
def test_right_code_passes_every_kind_of_assert_test(backend: str) -> None:
    program = (
        "from collections import Counter, namedtuple\n"
        "P = namedtuple('P', 'x y')\nclass Stack(list):\n    def push(self, x): self.append(x); return self\n"
        "def f(x): return x\ndef gen(n): yield from range(n)\ndef pair(): return P(1, 2)\n"
        "def count(s): return Counter(s)\ndef sum(a, b): return a + b\n"
    )
    tests = [
        "assert f([1]) == [1]", "assert f((1, 2)) == (1, 2)", "assert f({1, 2}) == {1, 2}",
        "assert f({1: (2,)}) == {1: (2,)}", "assert f(None) is None", "assert f(True)", "assert not f(0)",
        "assert f(b'a') == b'a'", "assert f(1j) == 1j", "import math\nassert math.isclose(f(0.1) + 0.2, 0.3)",
        "assert pair() == (1, 2)", "assert count('aa') == {'a': 2}", "assert sum(1, 2) == 3",
        "s = Stack(); s.push(3)\nassert s.pop() == 3\nassert len(s) == 0", "x = [2, 1]\nx.sort()\nassert x == [1, 2]",
        "assert all(v > 0 for v in f([1, 2]))", "assert [f(i) for i in range(3)] == [0, 1, 2]",
        "assert f('ab').startswith('a')", "assert isinstance(f([]), list)", "assert list(gen(2)) == [0, 1]",
            "assert list(map(f, [1, 2])) == [1, 2]", "import math\ny = f(0.5)\nassert math.isclose(y, 0.5)",
        "assert f(frozenset([1])) == frozenset([1])", "assert f(10 ** 30) == 10 ** 30",
    ]  # fmt: skip
    assert rewarded(program, tests, backend) == {"reward": 1.0, "passed": 1.0, "ended": 0.0}
    assert rewarded(program.replace("return x", "return [x]"), tests, backend)[
        "passed"
    ] == pytest.approx(8 / len(tests))


@confined
@pytest.mark.parametrize(
    "wanted", ["[41]", "{41}", pytest.param("{41: [1]}", marks=pytest.mark.matrix)]
)
def test_values_of_equal_hashes_take_no_time_of_the_process_that_judges(
    wanted: str, backend: str, short: None
) -> None:
    items = "[i * ((1 << 61) - 1) for i in range(1, 30000)]"
    program = (
        "import json, os\n"
        f"for value in ({{'set': {items}}}, {{'dict': [[i, 0] for i in {items}]}}):\n"
        "    os.write(3, json.dumps({'values': [value]}, separators=(',', ':')).encode() + b'\\n')\n"
    )
    before = time.process_time()
    assert rewarded(program, [f"assert f(1) == {wanted}"], backend)["reward"] == 0.0
    assert rewarded(program, [f"assert f(1) == {wanted}"] * 2, backend)["reward"] == 0.0
    assert time.process_time() - before < 6.0


@confined
def test_the_codes_time_begins_when_it_may_run(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = sandbox._command
    monkeypatch.setattr(
        sandbox, "_command", lambda where: ["sh", "-c", 'sleep 1.2; exec "$@"', "sh", *begin(where)]
    )
    (answer,) = sandbox.run(backend, "print(1)", [{"stdin": ""}], [0], 1.0, 1.0)
    assert answer == {"printed": "1\n"}


# The outside


@confined
def test_secrets_files_and_other_processes_cannot_be_read(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "link").symlink_to("/etc/passwd")
    pipe, end = os.pipe()
    os.write(end, SECRET.encode())
    program = f"""
import os
got = []
ppid = {os.getpid()}
for path in ["{tmp_path}/secret", "{tmp_path}/link", "/etc/passwd", "/proc/self/environ", "/proc/self/maps",
             "/proc/1/environ", f"/proc/{{ppid}}/environ", f"/proc/{{ppid}}/mem", f"/proc/{{os.getppid()}}/environ",
             "/proc/cpuinfo", "/dev/mem", "/sys/kernel/notes", "{Path.home()}", "{Path(__file__)}",
             "/usr/lib/../../etc/passwd", "/dev/shm", "/tmp"]:
    try: got.append((path, os.open(path, os.O_RDONLY)))
    except OSError: pass
for path in ["/", "/proc", "{tmp_path}", "/home"]:
    try: got.append((path, os.listdir(path)))
    except OSError: pass
empty = ("/", "{Path.home()}", "/tmp", "{tmp_path}", "/home") if "{backend}" == "bubblewrap" else ()
print([each for each in got if each[0] not in empty])
print("SOME_API_KEY" in os.environ)
"""
    said = printed(program, backend)
    os.close(pipe)
    os.close(end)
    assert SECRET not in said and "passwd" not in said
    assert said == "[]\nFalse\n"


#: Numbers on x86_64 and aarch64, and arguments; "pid" is the reward's process.
CALLS: dict[str, tuple[int, int, tuple[Any, ...]]] = {
    "kill": (62, 129, ("pid", 0)), "tkill": (200, 130, ("pid", 0)), "tgkill": (234, 131, ("pid", "pid", 0)),
    "rt_sigqueueinfo": (129, 138, ("pid", 0, b"\0" * 128)),
    "rt_tgsigqueueinfo": (297, 240, ("pid", "pid", 0, b"\0" * 128)), "pidfd_open": (434, 434, ("pid", 0)),
    "pidfd_getfd": (438, 438, (3, 0, 0)), "pidfd_send_signal": (424, 424, (3, 0, 0, 0)),
    "F_SETOWN": (72, 25, (3, 8, "pid")), "F_SETSIG": (72, 25, (3, 10, 9)), "F_SETFL": (72, 25, (3, 4, 0o20000)),
    "F_SETPIPE_SZ": (72, 25, (3, 1031, 1 << 20)), "FIOASYNC": (16, 29, (3, 0x5452, b"\1\0\0\0")),
    "TIOCSTI": (16, 29, (0, 0x5412, b"a")), "ptrace": (101, 117, (16, "pid", 0, 0)),
    "process_vm_readv": (310, 270, ("pid", 0, 0, 0, 0, 0)), "process_vm_writev": (311, 271, ("pid", 0, 0, 0, 0, 0)),
    "kcmp": (312, 272, ("pid", "pid", 0, 0, 0)), "fork": (57, 220, ()), "vfork": (58, 220, ()),
    "clone": (56, 220, (17, 0, 0, 0, 0)), "clone3": (435, 435, (b"\0" * 88, 88)),
    "execve": (59, 221, (b"/bin/true", 0, 0)), "execveat": (322, 281, (-100, b"/bin/true", 0, 0, 0)),
    "socket": (41, 198, (1, 1, 0)), "socketpair": (53, 199, (1, 1, 0, b"\0" * 8)),
    "connect": (42, 203, (3, b"\0" * 16, 16)), "memfd_create": (319, 279, (b"a", 0)), "memfd_secret": (447, 447, (0,)),
    "pipe2": (293, 59, (b"\0" * 8, 0)), "eventfd2": (290, 19, (0, 0)), "epoll_create1": (291, 20, (0,)),
    "inotify_init1": (294, 26, (0,)), "timerfd_create": (283, 85, (1, 0)),
    "signalfd4": (289, 74, (-1, b"\0" * 8, 8, 0)), "io_uring_setup": (425, 425, (1, b"\0" * 120)),
    "io_setup": (206, 0, (1, b"\0" * 8)), "userfaultfd": (323, 282, (1,)), "bpf": (321, 280, (0, 0, 0)),
    "perf_event_open": (298, 241, (b"\0" * 128, 0, -1, -1, 0)), "keyctl": (250, 219, (0, -3, 0)),
    "add_key": (248, 217, (b"user", b"a", b"b", 1, -3)), "shmget": (29, 194, (0, 4096, 0o1600)),
    "msgget": (68, 186, (0, 0o1600)), "semget": (64, 190, (0, 1, 0o1600)),
    "mq_open": (240, 180, (b"a", 0o102, 0o600, 0)), "shmat": (30, 196, (0, 0, 0)),
    "prctl PDEATHSIG": (157, 167, (1, 0, 0, 0, 0)), "prctl DUMPABLE": (157, 167, (4, 1, 0, 0, 0)),
    "seccomp": (317, 277, (0, 0, 0)), "setsid": (112, 157, ()), "setpgid": (109, 154, (0, 0)),
    "setrlimit": (160, 164, (9, b"\377" * 16)), "prlimit64": (302, 261, (0, 9, b"\377" * 16, 0)),
    "prlimit64 other": (302, 261, ("pid", 9, 0, b"\0" * 16)), "setpriority": (141, 140, (0, 0, -1)),
    "sched_setaffinity": (203, 122, ("pid", 8, b"\1" + b"\0" * 7)),
    "sched_setscheduler": (144, 119, (0, 1, b"\1\0\0\0")), "setuid": (105, 146, (0,)),
    "capset": (126, 91, (b"\0" * 8, b"\0" * 24)), "unshare": (272, 97, (0x10000000,)), "setns": (308, 268, (3, 0)),
    "mount": (165, 40, (b"a", b"/", b"tmpfs", 0, 0)), "chroot": (161, 51, (b"/",)), "chdir": (80, 49, (b"/tmp",)),
    "personality": (135, 92, (0x0040000,)), "mlock": (149, 228, (0, 4096)), "mlockall": (151, 230, (1,)),
    "madvise HWPOISON": (28, 233, (0, 4096, 100)), "mbind": (237, 235, (0, 0, 0, 0, 0, 0)),
    "open": (2, 56, (b"/tmp/x", 0o101, 0o600)), "openat": (257, 56, (-100, b"/tmp/x", 0o102, 0o600)),
    "openat2": (437, 437, (-100, b"/etc/passwd", b"\0" * 24, 24)),
    "O_TMPFILE": (257, 56, (-100, b"/tmp", 0o20200002, 0o600)), "fchmodat2": (452, 452, (-100, b"file", 0o777, 0)),
    "fchmod": (91, 52, (3, 0o777)), "fchown": (93, 55, (3, 0, 0)), "unlinkat": (263, 35, (-100, b"file", 0)),
    "renameat2": (316, 276, (-100, b"file", -100, b"b", 0)), "linkat": (265, 37, (-100, b"file", -100, b"b", 0)),
    "symlinkat": (266, 36, (b"a", -100, b"/tmp/b")), "mkdirat": (258, 34, (-100, b"/tmp/b", 0o700)),
    "mknodat": (259, 33, (-100, b"/tmp/b", 0o10600, 0)), "truncate": (76, 45, (b"file", 0)),
    "ftruncate": (77, 46, (3, 0)), "fallocate": (285, 47, (3, 0, 0, 1)),
    "setxattr": (188, 5, (b"file", b"user.a", b"b", 1, 0)), "utimensat": (280, 88, (-100, b"file", 0, 0)),
    "readlinkat": (267, 78, (-100, b"/proc/self/exe", b"\0" * 99, 99)), "sendfile": (40, 71, (3, 0, 0, 1)),
    "splice": (275, 76, (0, 0, 3, 0, 1, 0)), "vmsplice": (278, 75, (3, 0, 0, 0)), "tee": (276, 77, (0, 3, 1, 0)),
    "syslog": (103, 116, (3, b"\0" * 9, 9)), "reboot": (169, 142, (0, 0, 0, 0)),
    "kexec_load": (246, 104, (0, 0, 0, 0)), "init_module": (175, 105, (0, 0, 0)), "acct": (163, 89, (b"a",)),
    "quotactl": (179, 60, (0, 0, 0, 0)), "name_to_handle_at": (303, 264, (-100, b"/", b"\0" * 99, b"\0" * 9, 0)),
    "open_by_handle_at": (304, 265, (3, b"\0" * 99, 0)), "clock_settime": (227, 112, (0, b"\0" * 16)),
    "timer_create": (222, 107, (0, 0, b"\0" * 8)), "landlock_create_ruleset": (444, 444, (0, 0, 1)),
    "rt_sigqueueinfo to a group": (129, 138, (-1, 0, b"\0" * 128)),
}  # fmt: skip


@confined
def test_the_kernel_refuses_every_call_that_reaches_beyond_the_process(
    backend: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "file").chmod(0o600)
    place = list(ARCHITECTURES).index(platform.machine())
    known = {"pid": os.getpid(), b"file": str(tmp_path / "file").encode()}
    calls = {
        name: (numbers[place], [known.get(a, a) for a in given])
        for name, (*numbers, given) in CALLS.items()
    }
    program = f"""
import ctypes
c = ctypes.CDLL(None, use_errno=True)
done = []
for name, (number, given) in {calls!r}.items():
    ctypes.set_errno(0)
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in given]
    got = c.syscall(ctypes.c_long(number), *given)
    if not (got == -1 and ctypes.get_errno() in (1, 38)): done.append((name, got, ctypes.get_errno()))
print(done)
"""
    assert printed(program, backend) == "[]\n"
    assert (tmp_path / "file").read_text() == "kept" and (
        tmp_path / "file"
    ).stat().st_mode & 0o777 == 0o600


@confined
def test_limits_hold_for_memory_descriptors_and_threads(backend: str) -> None:
    program = """
import ctypes, mmap, os, resource
c = ctypes.CDLL(None)
got = []
for make in (lambda: bytearray(10 ** 10), lambda: mmap.mmap(-1, 10 ** 10), lambda: [os.dup(2) for _ in range(1000)]):
    try: make(); got.append(make)
    except (MemoryError, OSError): pass
print(got, resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_FSIZE))
"""
    assert printed(program, backend) == "[] (0, 0) (0, 0)\n"
    bomb = (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=[9]).start()"
    )
    before = time.monotonic()
    assert rewarded(bomb.replace("import", "import threading; threading.stack_size(32768); import"),
                  {"inputs": [""], "outputs": ["1"]}, backend) == {**WRONG, "ended": 1.0}  # fmt: skip
    assert (
        time.monotonic() - before < code.SECONDS_PER_TEST
    )  # ended by the limit on threads, not by the timeout


# Output


@confined
@pytest.mark.parametrize(
    "noise",
    [
        "while True: os.write(2, b'x' * 65536)",
        "while True: os.write(3, b'x' * 65536)",
        "while True: os.write(3, b'{}\\n' * 20000)",
        "while True: os.write(3, b'\\n' * 65536)",
        pytest.param("while True: print('x' * 65536)", marks=pytest.mark.matrix),
        pytest.param("while True: print('x' * 65536, file=sys.stderr)", marks=pytest.mark.matrix),
        "os.write(2, b'this kernel does not confine a process (seccomp)\\n'); os._exit(1)",
        "os.write(2, b'\\xff'); os.write(3, b'\\xff\\n\\xfe\\n')",
        "os.write(3, b'oops}\\n')",
        "os.write(3, b'{\"printed\": 5}\\n')",
        'os.write(3, b\'{"printed": NaN, "values": 1e999}\\n\')',
        "os.write(3, b'[' * 100000 + b'\\n')",
        "os.write(3, b'{\"printed\":' * 20000 + b'1' + b'}' * 20000 + b'\\n')",
        "os.write(3, b'{\"printed\": ' + b'9' * 50000 + b'}\\n')",
        "os.write(3, b'null\\n[]\\n1\\n\"a\"\\n')",
        "os.close(3); os._exit(3)",
        "sys.stdout.close(); sys.stdin.close()",
        "sys.stdout = None",
        "sys.stdout = 5; sys.modules['json'] = 5; json.dumps = None",
        "signal.raise_signal(signal.SIGKILL)",
        "ctypes.string_at(0)",
        pytest.param(
            "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(99)",
            marks=pytest.mark.matrix,
        ),
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
        pytest.param(
            "sys.setrecursionlimit(10 ** 9)\ndef f(): return [f()]\nf()", marks=pytest.mark.matrix
        ),
        "raise BaseException(b'\\xff' * 10 ** 7)",
        "class E(Exception):\n    def __str__(self): os._exit(1)\nraise E",
        "print('\\ud800', chr(0), '\\u2028')",
        "sys.stdout.buffer.write(b'\\xff\\xfe' * 9)",
        "exec('(' * 10 ** 6)",
        "sys.settrace(lambda *_: os._exit(0)); sys.exit()",
        "threading.Thread(target=time.sleep, args=[9]).start()",
        pytest.param("10 ** 10 ** 10", marks=pytest.mark.matrix),
    ],
)
def test_noise_a_crash_and_a_limit_are_one_result(noise: str, backend: str, short: None) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    program = f"import ctypes, json, os, signal, sys, threading, time\n{noise}"
    result = rewarded(program, {"inputs": ["", ""], "outputs": ["3", "4"]}, backend)
    assert result.keys() == {"reward", "passed", "ended"} and result["reward"] == 0.0
    assert time.monotonic() - began < 6.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # KB


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary().map(lambda b: b.hex()),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["printed", "returned", "values", "error", "passed", "set", "dict", "bytes", "complex"]),
        inner,
    ),
    max_leaves=12,
)  # fmt: skip
_WANTED = ["3", 5, split("assert f() == 1"), split("assert len(f()) == 1")]


@given(st.lists(st.binary(max_size=60) | _VALUES.map(lambda v: json.dumps(v).encode()), max_size=4))
@settings(max_examples=100, deadline=None)
def test_whatever_stands_in_the_answers_is_data(lines: list[bytes]) -> None:
    for wanted, line in zip(
        ["3", 5, code.split("assert f() == 1"), code.split("assert len(f()) == 1")],
        lines,
        strict=False,
    ):
        answer = sandbox._answer(line, 0)
        assert isinstance(answer, dict)
        if code.right(answer, wanted):
            assert (
                answer.get("printed") == "3"
                or answer.get("returned") == 5
                or answer.get("values") in ([1], [1.0], [True])
            )


@confined
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.binary(max_size=40) | _VALUES.map(lambda v: json.dumps(v).encode() + b"\n"),
        ),
        max_size=6,
    ),
    st.sampled_from(
        [
            "",
            "os._exit(0)",
            "raise SystemExit",
            "1/0",
            "sys.stdout = None",
            "print(3)",
            "os.kill(0, 9)",
        ]
    ),
)
@settings(max_examples=20, deadline=None)
def test_any_output_on_any_descriptor_has_a_result(
    writes: list[tuple[int, bytes]], end: str
) -> None:
    program = f"import os, sys\nfor d, data in {writes!r}:\n    try: os.write(d, data)\n    except OSError: pass\n{end}"
    result = rewarded(program, {"inputs": ["", ""], "outputs": [SECRET, SECRET]}, "auto")
    assert result["reward"] == 0.0 and result["ended"] in (0.0, 1.0)


# Leftovers


def _below(process: int) -> list[int]:
    found = [
        int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]
    return found + [each for one in found for each in _below(one)]


def _gone(processes: list[int]) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not any(_runs(each) for each in processes):
            return True
        time.sleep(0.02)
    return False


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@confined
def test_the_code_ends_with_the_process_that_judges_it(backend: str) -> None:
    deaf = (
        "import ctypes, signal, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: time.sleep(99)"
    )
    program = f"from skyasync.rewards.sandbox import run; run({backend!r}, {deaf!r}, [{{'stdin': ''}}], [0], 60.0, 60.0)"
    with subprocess.Popen([sys.executable, "-c", program]) as judge:
        until, below = time.monotonic() + 30, list[int]()
        wanted = 1 if backend == "landlock" else 3  # bubblewrap, its first process, the code's
        while time.monotonic() < until and len(below) < wanted:
            time.sleep(0.05)
            below = _below(judge.pid)
        time.sleep(0.3)  # the code has begun
        assert len(below) == wanted and all(_runs(each) for each in below)
        judge.kill()
    assert _gone(below)


@confined
def test_nothing_of_a_program_that_is_ended_is_left(backend: str, short: None) -> None:
    before, descriptors = set(_below(os.getpid())), len(os.listdir("/proc/self/fd"))
    rewarded("import time\ntime.sleep(99)", {"inputs": [""], "outputs": ["1"]}, backend)
    assert set(_below(os.getpid())) <= before
    assert len(os.listdir("/proc/self/fd")) == descriptors


# The filter, on both architectures


def _filter_result(program: bytes, machine: str, number: int, arguments: tuple[int, ...]) -> int:
    """The result of the kernel's packet filter for a call."""
    given = list(arguments) + [0] * (6 - len(arguments))
    data = struct.pack(
        "=iIQ6Q", number, ARCHITECTURES[machine], 0, *(a & (2**64 - 1) for a in given)
    )
    at, word = 0, 0
    while True:
        operation, yes, no, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if operation == sandbox_program.LOAD:
            (word,) = struct.unpack_from("=I", data, value)
        elif operation == sandbox_program.RETURN:
            return int(value)
        else:
            met = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[operation]
            at += yes if met else no


FILTERS = {machine: b"".join(instructions(machine, 77)) for machine in ARCHITECTURES}
EDGES = [
    0,
    1,
    2,
    3,
    4,
    8,
    10,
    77,
    100,
    1030,
    0x3D0F00,
    0x7D0F00,
    0x10003D0F00,
    0x5401,
    0x5412,
    0o101,
    2**32,
    2**64 - 1,
]
ARGUMENTS = st.lists(st.sampled_from(EDGES) | st.integers(0, 2**64 - 1), min_size=6, max_size=6)


@given(st.sampled_from([*ARCHITECTURES]), st.integers(0, 600), ARGUMENTS)
@settings(max_examples=300, deadline=None)
def test_only_what_is_listed_is_allowed(machine: str, number: int, arguments: list[int]) -> None:
    place, own = list(ARCHITECTURES).index(machine), 77
    said = _filter_result(FILTERS[machine], machine, number, tuple(arguments))
    low = [argument & (2**32 - 1) for argument in arguments]
    allowed = number in {numbers[place] for numbers in ALLOWED.values()}
    for numbers, argument, values in ALLOWED_WITH.values():
        allowed |= number == numbers[place] and low[argument] in values
    for *numbers_of_open, argument in OPEN.values():
        allowed |= number == numbers_of_open[place] and not low[argument] & sandbox_program.WRITING
    allowed |= number == sandbox_program.TGKILL[place] and low[0] == own
    allowed |= number == sandbox_program.PRLIMIT[place] and low[0] == 0 and arguments[2] == 0
    assert (said == sandbox_program.ALLOW) == allowed


def test_other_architectures_and_other_numbers_of_calls_are_refused() -> None:
    assert _filter_result(FILTERS["x86_64"], "aarch64", 0, ()) == sandbox_program.KILL
    assert _filter_result(FILTERS["x86_64"], "x86_64", 0x40000000, ()) != sandbox_program.ALLOW


# Choice of the sandbox


class Fusion(BaseHTTPRequestHandler):
    """In place of SandboxFusion's ``/run_code``: it runs the program with its input."""

    asked: list[dict[str, Any]]
    mode = "run"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append({**asked, "path": self.path})
        about_model = "zap" in asked["stdin"]
        if self.mode == "broken" or (self.mode == "zapped" and about_model):
            return self._say(500, b"<html>")
        if self.mode == "nonsense":
            return self._say(200, b'{"status": [[[')
        if self.mode == "failed":
            return self._say(
                200, b'{"status": "SandboxError", "message": "no room", "run_result": null}'
            )
        if self.mode == "huge" and about_model:
            return self._say(200, b"x" * 20_000_000)
        done = subprocess.run(
            [sys.executable, "-c", asked["code"]],
            input=asked["stdin"],
            capture_output=True,
            text=True,
            check=False,
        )
        result = {
            "status": "Finished",
            "return_code": done.returncode,
            "stdout": done.stdout,
            "stderr": done.stderr,
        }
        return self._say(
            200, json.dumps({"status": "Success", "message": "", "run_result": result}).encode()
        )

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the huge answer is not read completely
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fusion() -> Iterator[tuple[str, type[Fusion]]]:
    class Handler(Fusion):
        asked: list[dict[str, Any]] = []  # noqa: RUF012

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Handler
    server.shutdown()
    server.server_close()
    thread.join()
    sandbox.choose.cache_clear()


def test_a_sandbox_server_runs_every_kind_of_test_and_is_told_no_expected_value(
    fusion: tuple[str, type[Fusion]],
) -> None:
    url, handler = fusion
    assert sandbox.choose(url) == url
    label = {"inputs": ["ab"], "outputs": ["abab"]}
    assert rewarded("print(input() * 2)", label, url)["reward"] == 1.0
    assert rewarded("print(input() * 3)", label, url)["reward"] == 0.0
    assert (
        rewarded(
            "def f(x): return [x] * 2",
            {"fn_name": "f", "inputs": [[77]], "outputs": [[77, 77]]},
            url,
        )["reward"]
        == 1.0
    )
    assert rewarded("def f(x): return [x] * 2", ["assert f(77) == [77, 77]"], url)["reward"] == 1.0
    assert "abab" not in json.dumps(handler.asked) and "77, 77" not in json.dumps(handler.asked)
    assert all(
        asked["path"] == "/run_code" and asked["language"] == "python" for asked in handler.asked
    )


@pytest.mark.parametrize("mode", ["broken", "nonsense", "failed"])
def test_a_server_that_fails_is_a_transient_error_in_one_line(
    mode: str, fusion: tuple[str, type[Fusion]]
) -> None:
    url, handler = fusion
    handler.mode = mode
    with pytest.raises(TransientError) as raised:
        rewarded("print(1)", {"inputs": [""], "outputs": ["1"]}, url)
    assert url in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(UserError, match=r"environment.code_sandbox=http.* does not work here"):
        sandbox.choose(url)


@pytest.mark.parametrize("mode", ["zapped", "huge"])
def test_a_program_that_a_working_server_fails_at_has_failed(
    mode: str, fusion: tuple[str, type[Fusion]]
) -> None:
    url, handler = fusion
    handler.mode = mode
    assert rewarded("print('zap')", {"inputs": [""], "outputs": ["1"]}, url) == {
        **WRONG,
        "ended": 1.0,
    }


def test_a_server_that_is_not_there_is_refused_before_the_run() -> None:
    with pytest.raises(
        UserError,
        match=r"environment.code_sandbox=http://127.0.0.1:9 does not work here: .*refused",
    ):
        sandbox.choose("http://127.0.0.1:9")


def test_where_nothing_confines_code_the_run_is_refused_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "_problem", lambda where: "not here")
    sandbox.choose.cache_clear()
    with pytest.raises(
        UserError,
        match=r"bubblewrap: not here; landlock: not here.*code_sandbox=http.*seccomp.*none",
    ):
        sandbox.choose("auto")
    with pytest.raises(TransientError, match="bubblewrap: not here"):
        code_tests("print(1)", {"inputs": [""], "outputs": ["1"]})


def test_less_protection_is_the_users_to_accept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("read")
    program = f"print(open({str(tmp_path / 'file')!r}).read())"
    assert printed(program, "none") == "read\n"
    assert (
        printed(f"import os; os.mkdir({str(tmp_path / 'new')!r})", "none") == ""
        and (tmp_path / "new").is_dir()
    )


@confined
def test_the_filter_alone_hides_no_files_and_refuses_the_rest(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("read")
    assert printed(f"print(open({str(tmp_path / 'file')!r}).read())", "seccomp") == "read\n"
    with pytest.raises(AssertionError, match="PermissionError"):
        printed("import os; os.fork()", "seccomp")


@confined
def test_ordinary_programs_run(backend: str) -> None:
    program = """
import sys, threading, hashlib, decimal, zoneinfo, datetime, concurrent.futures, random, time, json, heapq
sys.setrecursionlimit(10 ** 6)
threading.stack_size(2 ** 27)
def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
thread = threading.Thread(target=lambda: print(deep(50000)))
thread.start(); thread.join()
with concurrent.futures.ThreadPoolExecutor(4) as pool: print(sum(pool.map(abs, range(10))))
print(hashlib.sha256(b"a").hexdigest()[:4], zoneinfo.ZoneInfo("UTC"), 0 <= random.random() < 1, decimal.Decimal(1) / 4)
time.sleep(0.01)
import numpy
print(int(numpy.arange(5).sum()), (numpy.ones((40, 40)) @ numpy.ones((40, 40)))[0, 0])
sys.stdout.buffer.write(b"end")
exit()
"""
    assert (
        printed(program, backend).replace("end", "") == "50000\n45\nca97 UTC True 0.25\n10 40.0\n"
    )


@confined
def test_signals_of_its_own_are_the_programs() -> None:
    program = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('got'))\nsignal.raise_signal(signal.SIGUSR1)"
    assert printed(program, "auto") == "got\n"
    assert signal.getsignal(signal.SIGUSR1) is not None
