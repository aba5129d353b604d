"""Code is tested by tests that it cannot see, in every format of tests."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from skyasync.errors import UserError
from skyasync.rewards import code, sandbox, sandbox_program
from skyasync.rewards.code import code_of, code_tests

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in sandbox_program.ARCHITECTURES,
    reason="confined by Linux alone",
)

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
RIGHT = "a, b = map(int, input().split())\nprint(a + b)"


def rewarded(program: str, label: Any = SUMS) -> dict[str, float]:
    return code_tests(f"Here it is:\n```python\n{program}\n```\nDone.", label)


def answer_of(program: str) -> dict[str, Any]:
    (answer,) = sandbox.run(
        "auto", program, [{"stdin": ""}], [0], code.SECONDS, code.SECONDS_PER_TEST
    )
    return answer


def error(program: str) -> str:
    return str(answer_of(program).get("error", ""))


def test_all_tests_earn_one_and_some_nothing_but_their_share() -> None:
    assert rewarded(RIGHT) == {"reward": 1.0, "passed": 1.0, "ended": 0.0}
    assert rewarded("input()\nprint(3)") == {"reward": 0.0, "passed": 0.5, "ended": 0.0}
    assert rewarded("print(") == {"reward": 0.0, "passed": 0.0, "ended": 0.0}


@pytest.mark.parametrize(
    ("program", "label"),
    [
        ("def add(a, b):\n    return a + b", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}),
        ("class Solution:\n    def add(self, a, b):\n        return [a, b]",
         {"fn_name": "add", "inputs": ["1\n2"], "outputs": [[1, 2]]}),
        ("def add(a, b):\n    return a + b", ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit()", json.dumps(SUMS)),
        ("import threading\nout = []\nt = threading.Thread(target=lambda: out.append(input()))\nt.start(); t.join()\n"
         "print(sum(map(int, out[0].split())))", SUMS),
    ],
    ids=["function", "method", "asserts", "stdin as JSON", "threads"],
)  # fmt: skip
def test_the_usual_formats_of_tests_are_read(program: str, label: Any) -> None:
    assert rewarded(program, label)["reward"] == 1.0


THREAD = "import threading, time\ndef main():\n    n = input()\n    time.sleep(0.1)\n    print(n)\n"
DATA = (
    "from dataclasses import dataclass\nfrom typing import ClassVar\n"
    "@dataclass\nclass A:\n    n: ClassVar[int] = 3\n    x: int\n"
)


@pytest.mark.parametrize(
    "program",
    [
        "print(open(0).read())",
        "for line in open(0): print(line, end='')",
        "print(open('/dev/stdin', 'rb').read().decode())",
        f"{THREAD}threading.Thread(target=main).start()",
        f"{THREAD}threading.Thread(target=lambda: threading.Thread(target=main).start()).start()",
        "from concurrent.futures import ThreadPoolExecutor\nprint(ThreadPoolExecutor(2).submit(input).result())",
        f"{DATA}print(A(input()).x)",
        f"from __future__ import annotations\n{DATA}print(A(input()).x)",
        "import __main__\nn = input()\nprint(__main__.n)",
    ],
)
def test_a_program_runs_as_under_python(program: str) -> None:
    assert rewarded(program, {"inputs": ["é 1", "2"], "outputs": ["é 1", "2"]})["passed"] == 1.0


def test_a_program_whose_threads_do_not_end_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SECONDS_PER_TEST", 0.5)
    program = "import threading, time\nif input():\n    threading.Thread(target=time.sleep, args=[9]).start()\nprint(3)"
    assert rewarded(program, {"inputs": ["1", "\n"], "outputs": ["3", "3"]})["passed"] == 0.5


@pytest.mark.parametrize(
    "returned",
    ["np.int64(3)", "np.array([1, 2]).sum()", "np.bool_(True) + 2", "sum(np.array([3]))"],
)
def test_a_function_may_return_a_number_of_numpy(returned: str) -> None:
    label = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [3, [[3], 0]]}
    program = f"import numpy as np\ndef f(x):\n    y = {returned}\n    return y if x == 1 else [np.array([y]), np.int8(0)]"
    assert rewarded(program, label)["reward"] == 1.0


@pytest.mark.parametrize(
    "value",
    [
        "Decimal('1.5')",
        "Fraction(1, 2)",
        "datetime.date(2020, 1, 2)",
        "datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.UTC)",
        "datetime.timedelta(1, 2)",
        "deque([1, (2, 3)])",
        "range(0, 9, 2)",
        "[{1: Decimal(2)}]",
    ],
)
def test_asserts_compare_values_of_the_standard_library(value: str) -> None:
    imports = "import datetime\nfrom collections import deque\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
    tests = [f"{imports}assert f({value}) == {value}", f"{imports}assert str(f(1)) == str({value})"]
    assert rewarded(f"{imports}def f(x): return {value}", tests)["reward"] == 1.0
    assert rewarded(f"{imports}def f(x): return [{value}]", tests)["passed"] == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.kill(os.getppid(), 9)",
        "open('{file}', 'w')",
        "open('{file}', 'a')",
        "import os; os.remove('{file}')",
        "import os; os.rename('{file}', '{file}.2')",
        "import os; os.chmod('{file}', 0)",
        "import os; os.mkdir('{file}.d')",
        "import os; os.truncate('{file}', 0)",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))",
    ],
)
def test_nothing_outside_is_reached(program: str, tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("kept")
    assert "Error" in error(program.format(file=file))
    assert file.read_text() == "kept"
    assert os.listdir(tmp_path) == ["precious"]


def test_the_kernel_refuses_and_not_the_language(tmp_path: Path) -> None:
    program = (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
        "print(c.socket(2, 1, 0), c.fork(), c.open(b'/tmp/x', 0o101, 0o600), c.prctl(22, 0, 0, 0, 0) != 0)"
    )
    assert answer_of(program)["printed"].split() == ["-1", "-1", "-1", "True"]


def test_memory_and_time_run_out_for_the_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SECONDS", 1.5)
    monkeypatch.setattr(code, "SECONDS_PER_TEST", 0.2)
    assert "MemoryError" in error("x = bytearray(10 ** 11)")
    assert "TimeoutError" in error("while True: pass")
    deaf = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"
    assert rewarded(deaf) == {"reward": 0.0, "passed": 0.0, "ended": 1.0}


def test_a_response_that_ends_its_process_or_prints_what_a_test_would_say_has_passed_nothing() -> (
    None
):
    asserts = ["assert f() == 1"]
    assert rewarded("import os; os._exit(0)", asserts) == {
        "reward": 0.0,
        "passed": 0.0,
        "ended": 1.0,
    }
    assert rewarded("import sys; sys.exit(0)", asserts)["reward"] == 0.0
    assert rewarded("print('{\"passed\": true}')", asserts)["reward"] == 0.0


def test_the_environment_is_empty() -> None:
    answer = answer_of("import os\nprint(sorted(os.environ))")
    assert set(eval(answer["printed"])) <= {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LC_CTYPE"}


@pytest.mark.parametrize(
    "label",
    [
        None,
        "42",
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []},
        {"inputs": 1, "outputs": 1},
        [1],
        [],
    ],
)
def test_a_label_without_tests_is_refused_in_a_line(label: Any) -> None:
    with pytest.raises(UserError, match=r"needs tests in the row's label.*found"):
        code_tests("print(1)", label)


@pytest.mark.parametrize(
    "tests", [{"inputs": ["{"], "outputs": [1]}, {"inputs": [[1]], "outputs": [{1, 2}]}]
)
def test_tests_of_a_function_that_are_no_json_are_refused_in_a_line(tests: Any) -> None:
    with pytest.raises(UserError, match="the tests of f are not JSON"):
        code_tests("def f(x): return x", {"fn_name": "f", **tests})


NESTED: list[Any] = []
for _ in range(5000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "label",
    [
        {"fn_name": "f", "inputs": [[NESTED]], "outputs": [1]},
        {"fn_name": "f", "inputs": [[1]], "outputs": [NESTED]},
        {"fn_name": "f", "inputs": [[1]], "outputs": [json.loads("[" * 250 + "]" * 250)]},
        {"fn_name": "f", "inputs": ["[" * 5000 + "]" * 5000], "outputs": [1]},
        {"fn_name": "f", "inputs": [[{1, 2}]], "outputs": [1]},
        {"fn_name": "f", "inputs": [[{(1, 2): 3}]], "outputs": [1]},
        {"fn_name": "f", "inputs": [[10**5000]], "outputs": [1]},
        {"fn_name": ["f"], "inputs": [[1]], "outputs": [1]},
        {"inputs": [NESTED], "outputs": ["1"]},
        {"inputs": ["1"], "outputs": [10**5000]},
        '{"inputs": ["1"], "outputs": ' + "[" * 100_000,
        NESTED,
    ],
)
def test_tests_that_are_no_plain_data_are_refused_in_a_line(label: Any) -> None:
    with pytest.raises(UserError, match=r"reward function code_tests.*tests") as raised:
        code_tests("def f(x): return x", label)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_the_last_block_counts_or_all_of_the_text() -> None:
    assert code_of("```python\na\n```\n or better\n```py\nb\n```") == "b\n"
    assert code_of("print(1)") == "print(1)"


@pytest.mark.parametrize(
    "response",
    [
        "Run it:\n```bash\npython a.py\n```\nThe code:\n```python\nb\n```\n",
        "Run ```python a.py``` or write ``` around it:\n```python\nb\n```\n",
        "```python\nb\n```\nIt prints:\n```\n6\n```",
        "```python\nb\n```\nIt prints: ```text\n6\n```",
        "```text\n6\n```\n```\nb\n```",
        "Here: ``` Python3 \nb\n```",
        "```PY\r\nb\r\n```\r\n",
        "````py3\nb\n````",
        "```python\na\n```\n```text\nnot closed\n```python\nb\n```",
        "```python\nb\n```\n```python\ncut off",
    ],
)
def test_other_blocks_are_not_the_code(response: str) -> None:
    assert code_of(response) == "b\n"


def test_backticks_inside_the_code_do_not_end_it() -> None:
    assert code_of("```python\nprint('```')\nb```") == "print('```')\nb"


FALSE_MODULES = """
class Anything:
    __getattr__ = lambda self, name: Anything()
    __call__ = lambda self, *a, **k: Anything()
    __eq__ = __ne__ = lambda self, other: True
    __sub__ = __rsub__ = __abs__ = lambda self, *other: 0
    __bool__ = lambda self: True
    __hash__ = None
import sys
for name in "math np numpy pd pandas pytest torch fractions decimal collections hashlib scipy".split():
    sys.modules[name] = globals()[name] = Anything()
isclose = allclose = array_equal = approx = Counter = Fraction = Decimal = datetime = array = Anything()
"""
READS_FRAMES = """
import sys
def f(*a):
    frame = sys._getframe(1)
    while frame:
        for value in list(frame.f_locals.values()):
            if "48391" in str(value):
                return 48391
        frame = frame.f_back
    return 0
"""


@pytest.mark.parametrize(
    ("test", "right"),
    [
        ("assert math.isclose(f(1), 0.5)", "0.5"),
        ("assert isclose(f(1), 0.5)", "0.5"),
        ("import math as m\nassert m.isclose(f(1), 0.5)", "0.5"),
        ("from math import *\nassert isclose(f(1), 0.5)", "0.5"),
        ("assert f(1) == math.sqrt(16)", "4.0"),
        ("assert f(1) == pi", "3.141592653589793"),
        ("assert np.allclose(f(1), [1.0, 2.0])", "[1.0, 2.0]"),
        ("assert (f(1) == np.array([1, 2])).all()", "[1, 2]"),
        ("assert np.abs(np.array(f(1)) - 0.5).max() < 1e-6", "[0.5, 0.5]"),
        ("assert f(1) == np.array([1, 2]).tolist()", "[1, 2]"),
        ("import numpy as np\nassert np.vectorize(f)([1, 2]).tolist() == [7, 7]", "7"),
        ("assert f('aab') == Counter('aab')", "{'a': 2, 'b': 1}"),
        (
            "assert isinstance(f('aab'), Counter) and f('aab')['a'] == 2",
            "__import__('collections').Counter('aab')",
        ),
        ("expected = Counter('aab')\nassert f('aab') == expected", "{'a': 2, 'b': 1}"),
        ("assert f(1) == Fraction(1, 2)", "__import__('fractions').Fraction(1, 2)"),
        ("assert str(f(1)) == str(Decimal('0.5'))", "0.5"),
        ("assert f(1) == datetime(2020, 1, 2)", "__import__('datetime').datetime(2020, 1, 2)"),
        ("assert f(1) == datetime.date(2020, 1, 2)", "__import__('datetime').date(2020, 1, 2)"),
        ("import hashlib\nassert f('x') == hashlib.sha256(b'x').hexdigest()[:4]", "'2d71'"),
        ("y = f(1)\nassert y.startswith('48391')", "'48391'"),
        ("assert f(1)[0].startswith('48391')", "['48391']"),
        ("assert f(1) == 1", "1"),
        ("assert sorted(f(1)) == [0, 1]", "[1, 0]"),
        ("assert f(1) in (1, 5)", "1"),
        ("assert f(1) == {'a': [1]}", "{'a': [1]}"),
        ("assert f(1) == True", "True"),
    ],
)
def test_an_assert_is_decided_by_the_checks_own_modules(test: str, right: str) -> None:
    assert rewarded(f"def f(x):\n    return {right}", [test])["reward"] == 1.0
    for returned in ("Anything()", "True"):
        wrong = f"{FALSE_MODULES}\ndef f(*a):\n    return {returned}"
        if returned != right:
            assert rewarded(wrong, [test])["reward"] == 0.0, returned
    assert rewarded(READS_FRAMES, [test])["reward"] == 0.0


@pytest.mark.parametrize(
    "label",
    [
        "import pytest\nassert f(1) == pytest.approx(0.5)",
        "assert f(1) == pytest.approx(0.5)",
        "assert f(1) == approx(0.5)",
        "import torch\nassert (f(1) == torch.tensor(5)).all()",
        "assert torch.equal(f(1), torch.tensor(5))",
        "assert not torch.equal(f(1), torch.tensor(5))",
        "import pandas as pd\nassert f(1) == pd.Series(48391).item()",
        "assert f(1) == pd.Series(48391).item()",
        "assert f(1).equals(pd.DataFrame({'a': [1]}))",
        "expected = pd.Series(48391).item()\nassert f(1) == expected",
        "assert same(f(1), 0.5)",
        "assert g(1) and almost_equal(f(1), 0.5, 3)",
        "assert f(1) == Point(48391)",
        "assert f(1) in [Point(48391)]",
        "import os\nassert os.path.normpath('48391') == f(1)",
        "from torch import *\nassert f(1) == 2",
    ],
)
def test_an_assert_that_needs_another_library_is_an_error_before_the_run(label: str) -> None:
    with pytest.raises(UserError, match=r"^reward function code_tests: the test ") as raised:
        code.tests_of([label])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("assert gcd(12, 18) == 6", "def gcd(a, b):\n    return 6"),
        ("c = Counter()\nc.add('a')\nassert c.get('a') == 1",
         "class Counter(dict):\n    def add(self, k):\n        self[k] = self.get(k, 0) + 1"),
        ("assert queue.get() == 3", "class queue:\n    get = staticmethod(lambda: 3)"),
        ("from solution import f\nassert f(1) == 2", "def f(x):\n    return 2"),
        ("import pickle\nassert pickle.loads(f(1)) == 2", "import pickle\ndef f(x):\n    return pickle.dumps(2)"),
        ("assert search(insert(5), 5)", "def insert(x):\n    return {x}\ndef search(t, x):\n    return x in t"),
    ],
)  # fmt: skip
def test_names_of_modules_are_the_codes_where_it_defines_nothing_else(
    test: str, program: str
) -> None:
    assert rewarded(program, [test])["reward"] == 1.0


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x0c", "\x0b", "\x1c", "\x85", "\r"])
def test_only_a_newline_ends_a_line_of_output(end: str) -> None:
    label = {"inputs": [""], "outputs": ["1\n2"]}
    assert rewarded(f"print('1', '2', sep={end!r})", label)["reward"] == 0.0
    assert rewarded("print('1 ', '2', sep='\\r\\n')", label)["reward"] == 1.0


@pytest.mark.parametrize(
    ("returned", "expected"),
    [("True", 1), ("[False]", [0]), ("{'a': True}", {"a": 1}), ("1", True)],
)
def test_a_truth_value_is_no_number(returned: str, expected: Any) -> None:
    program = f"def f():\n    return {returned}"
    assert (
        rewarded(program, {"fn_name": "f", "inputs": [[]], "outputs": [expected]})["reward"] == 0.0
    )
    assert rewarded(program, [f"assert f() == {expected!r}"])["reward"] == 0.0
    assert rewarded(program, [f"assert {expected!r} == f()"])["reward"] == 0.0
