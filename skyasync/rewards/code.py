"""Code that a model wrote, rewarded by tests that it does not see.

Invariant: the code runs in ``sandbox`` alone, never here. What a test expects is compared here,
with plain data, never where the code runs. A response that hangs, fills its memory, writes invalid
output or reaches for anything outside fails its tests, and changes nothing else.
"""

from __future__ import annotations

import json
import reprlib
import time
from typing import Any

from skyasync.errors import UserError
from skyasync.rewards import REWARDS, Capabilities, sandbox
from skyasync.rewards.asserts import Split, split
from skyasync.rewards.sandbox_program import equal, plain
from skyasync.rewards.signature import Inputs

# For all tests of a response. Less than the default of environment.reward_timeout_s (10 s), after
# which a response has no reward at all instead of that of its failed tests.
SECONDS = 6.0
SECONDS_PER_TEST = 2.0
_PYTHON = ("python", "py", "python3", "py3")  # tags of a code block

Test = tuple[dict[str, Any], Any]  # the request for the sandbox, and the expected answer


def _check_row(inputs: Inputs) -> None:
    tests_of(inputs.get("label"))
    sandbox.choose(str(inputs.get("code_sandbox", "auto")))


@REWARDS.register("code_tests")
@Capabilities(check=_check_row)
def code_tests(response: str, label: object, code_sandbox: str = "auto") -> dict[str, float]:
    """1 if the last Python block of the response (see ``code_of``) passes every test of the label.

    Metrics: ``passed``, the share of tests that pass; ``ended``, 1 if time or memory ran out.

    Args:
        label: the tests, as a mapping or its JSON, in one of the forms of the field's datasets:
            ``{"inputs": [...], "outputs": [...]}``, what a program reads and must print; with
            ``"fn_name"`` the arguments and results of a function (or a method of ``Solution``); or
            a list of ``assert`` statements.
        code_sandbox: where the code runs, ``environment.code_sandbox``.

    Raises:
        UserError: for a label that is none of these.
        TransientError: if the sandbox fails for any code.
    """
    tests = tests_of(label)
    started = time.monotonic()
    requests = []
    sizes = []
    for request, target in tests:
        requests.append(request)
        sizes.append(8 * len(repr(target)))  # JSON of the same value is at most so much longer
    answers = sandbox.run(
        code_sandbox, code_of(response), requests, sizes, SECONDS, SECONDS_PER_TEST
    )
    # Fewer answers than tests: the time or memory ran out, and the other tests fail.
    passed: list[bool] = []
    check_numbers: list[int] = []
    checks: list[dict[str, Any]] = []
    for number, (answer, (_, target)) in enumerate(zip(answers, tests, strict=False)):
        passed.append(right(answer, target))
        values = answer.get("values")
        if isinstance(target, Split) and not target.is_plain and isinstance(values, list):
            check_numbers.append(number)
            checks.append({"check": target.check, "values": values})
    if checks:  # in a process that has not run the code
        remaining_s = max(1.0, SECONDS - (time.monotonic() - started))
        results = sandbox.run(
            code_sandbox, "", checks, [0] * len(checks), remaining_s, SECONDS_PER_TEST
        )
        for number, result in zip(check_numbers, results, strict=False):
            passed[number] = result.get("passed") is True
    share = sum(passed) / len(tests)
    return {
        "reward": float(share == 1.0),
        "passed": share,
        "ended": float(len(answers) < len(tests)),
    }


def code_of(response: str) -> str:
    """The last block between three backticks that is tagged as Python, or else has no tag.

    Without such a block it is the complete response.
    """
    blocks: dict[str, str] = {}  # the last block by tag, all of _PYTHON as "python"
    tag: str | None = None  # of the block that the line is in
    lines: list[str] = []
    for line in response.replace("\r\n", "\n").split("\n"):
        text, fence, word = line.rpartition("```")
        word = word.strip().lower()
        # A Python tag begins a block anywhere: the block before it was not closed.
        opens = word in _PYTHON or (tag is None and "```" not in text and " " not in word)
        if fence and opens:
            tag = "python" if word in _PYTHON else word
            lines = []
        elif fence and not word and tag is not None:
            blocks[tag] = "\n".join([*lines, text.rstrip("`")])
            tag = None
        else:
            lines.append(line)
    return blocks.get("python", blocks.get("", response))


def tests_of(label: object) -> list[Test]:
    """The tests of a label: for each the sandbox's request, and the expected answer.

    Raises:
        UserError: for a label in none of the forms of ``code_tests``.
    """
    content: Any = label
    if isinstance(label, str):
        try:
            content = json.loads(label)
        except (ValueError, RecursionError):
            content = [label] if "assert" in label else label
    tests: list[Test] = []
    try:
        match content:
            case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
                name = content.get("fn_name")
                for value, target in zip(inputs, outputs, strict=True):
                    if not name:
                        tests.append(({"stdin": _text(value)}, _text(target)))
                    elif isinstance(name, str):
                        request = {"call": name, "arguments": _plain(_arguments(value))}
                        tests.append((request, _plain(target)))
            case list() if all(isinstance(line, str) for line in content):
                for line in content:
                    split_test = split(line)
                    tests.append(({"steps": split_test.steps}, split_test))
    except (ValueError, TypeError, RecursionError) as error:
        subject = "a program"
        if isinstance(content, dict):
            subject = content.get("fn_name") or subject
        raise UserError(
            f"reward function code_tests: the tests of {subject} are not JSON: {error}"
        ) from error
    if not tests:
        raise UserError(
            f"reward function code_tests needs tests in the row's label: {{inputs: [...], outputs: [...]}} (with "
            f"fn_name, a text, for a function), or a list of assert statements; found {reprlib.repr(label)}"
        )
    return tests


def right(answer: dict[str, Any], expected: object) -> bool:
    """Whether a test's answer is the expected one.

    A truth value does not equal a number. In printed text, spaces at the ends of lines do not
    count.
    """
    try:
        if "error" in answer:
            return False
        if isinstance(expected, Split):
            (value,) = answer["values"]
            return expected.is_plain and bool(equal(value, plain(expected.literal)))
        if "printed" in answer:
            return isinstance(expected, str) and _lines(answer["printed"]) == _lines(expected)
        return bool(equal(answer["returned"], expected))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return False  # the code may have written anything in the place of an answer


def _arguments(value: object) -> list[Any]:
    """Arguments: a list of them, or one JSON value per line, as LiveCodeBench has them."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def _plain(value: object) -> object:
    """The value as it is after it went to the sandbox as JSON: tuples are lists."""
    decoded: object = json.loads(json.dumps(value))
    if sandbox.is_deep(decoded):
        raise ValueError(f"a value has more than {sandbox.DEEPEST} levels")
    return decoded


def _text(value: object) -> str:
    """A program's input or output: a text, or a list of lines."""
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    return str(value)


def _lines(text: str) -> list[str]:
    """The lines between newlines; unlike ``splitlines`` other line ends of Unicode are text."""
    return [line.rstrip(" \t\r") for line in text.strip(" \t\r\n").split("\n")]
