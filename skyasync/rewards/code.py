"""Code that a model wrote, judged by tests that it does not see.

Invariant: the code runs in ``sandbox.py`` alone, never here, and what a test expects is compared here, never there; a
response that hangs, fills its memory or reaches for anything outside fails its tests and touches nothing.
"""

from __future__ import annotations

import json
import platform
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyasync.errors import UserError
from skyasync.rewards import sandbox
from skyasync.rewards.registry import REWARDS

SECONDS = 6.0  # for all tests of a response: less than environment.reward_timeout_s, so that it is this that ends it
SECONDS_PER_TEST = 2.0
MEMORY_MB = 1024
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@REWARDS.register("code_tests")
def code_tests(response: str, label: object) -> dict[str, float]:
    """1 if the last code block of the response (all of it, if there is none) passes every test of the label.

    ``passed`` is the share of tests that pass, ``ended`` whether its time or memory ran out.

    Args:
        label: the tests, as a mapping or its JSON, in one of the forms of the field's datasets:
            ``{"inputs": [...], "outputs": [...]}``, what a program reads and must print; with ``"fn_name"`` what a
            function (or a method of ``Solution``) is given and must return; or a list of ``assert`` statements.

    Raises:
        UserError: for a label that is none of these, and where there is no Linux to confine a process.
    """
    tests = tests_of(label)
    answers, ended = run(code_of(response), [asked for asked, _ in tests])
    passed = [right(answer, expected) for answer, (_, expected) in zip(answers, tests, strict=False)]
    share = sum(passed) / len(tests)
    return {"reward": float(share == 1.0), "passed": share, "ended": float(ended)}


def code_of(response: str) -> str:
    """The last block between three backticks, or all of it."""
    blocks = _BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def tests_of(label: object) -> list[tuple[dict[str, Any], Any]]:
    """What the sandbox is asked for each test, and what is expected of its answer."""
    said = _parsed(label)
    if isinstance(said, dict) and {"inputs", "outputs"} <= said.keys() and len(said["inputs"]) == len(said["outputs"]):
        pairs, name = list(zip(said["inputs"], said["outputs"], strict=True)), said.get("fn_name")
        if name:
            found: list[tuple[dict[str, Any], Any]] = [({"call": name, "arguments": _list(i)}, o) for i, o in pairs]
        else:
            found = [({"stdin": _text(given)}, _text(wanted)) for given, wanted in pairs]
    elif isinstance(said, list) and all(isinstance(line, str) for line in said):
        tokens = [secrets.token_hex() for _ in said]
        found = [({"check": line, "token": token}, token) for line, token in zip(said, tokens, strict=True)]
    else:
        found = []
    if not found:
        shown = repr(label) if len(repr(label)) <= 80 else f"{repr(label)[:77]}..."
        raise UserError(
            f"reward function code_tests needs tests in the row's label: {{inputs: [...], outputs: [...]}} (with "
            f"fn_name for a function), or a list of assert statements; found {shown}"
        )
    return found


def run(code: str, tests: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """The answers of the tests that were reached, and whether the sandbox was ended before the last."""
    if sys.platform != "linux" or platform.machine() not in sandbox.ARCHITECTURES:
        raise UserError("reward function code_tests confines code by Linux's seccomp (x86_64, aarch64): not here")
    task = {
        "code": code, "tests": list(tests), "seconds": SECONDS, "seconds_per_test": SECONDS_PER_TEST,
        "memory_mb": MEMORY_MB,
    }  # fmt: skip
    command = [sys.executable, "-I", "-B", str(Path(sandbox.__file__))]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, cwd="/", start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            out, problem = process.communicate(json.dumps(task), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, problem = process.communicate()
    if "does not confine a process" in problem:
        raise UserError(f"reward function code_tests: {problem.strip().splitlines()[-1]}")
    answers = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
    return answers, len(answers) < len(tests)


def right(answer: dict[str, Any], expected: object) -> bool:
    """Whether a test's answer is what was expected; of what is printed, spaces at the ends of lines do not count."""
    if "error" in answer:
        return False
    if "printed" in answer:
        return _lines(answer["printed"]) == _lines(str(expected))
    if "returned" in answer:
        return bool(answer["returned"] == json.loads(json.dumps(expected)))
    return answer.get("passed") == expected


def _parsed(label: object) -> object:
    if not isinstance(label, str):
        return label
    try:
        found: object = json.loads(label)
        return found
    except ValueError:
        return [label] if "assert" in label else label


def _list(given: object) -> list[Any]:
    """Arguments: a list of them, or one JSON value per line, as LiveCodeBench has them."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    return list(given) if isinstance(given, list | tuple) else [given]


def _text(given: object) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list | tuple) else str(given)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
