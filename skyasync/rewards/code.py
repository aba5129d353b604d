"""Code that a model wrote, rewarded by tests that it does not see.

Invariant: the code runs in ``sandbox`` alone, never here. What a test expects is compared here,
with plain data, never where the code runs. A response that hangs, fills its memory, writes invalid
output or reaches for anything outside fails its tests, and changes nothing else.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Mapping
from typing import Any

from skyasync.errors import UserError
from skyasync.rewards import REWARDS, Capabilities, sandbox
from skyasync.rewards.asserts import Split, split
from skyasync.rewards.sandbox_program import equal, plain

# for all tests of a response: less than environment.reward_timeout_s, so that it is this that ends
# it
SECONDS = 6.0
SECONDS_PER_TEST = 2.0
_PYTHON = ("python", "py", "python3", "py3")  # tags of a code block


def _check_row(known: Mapping[str, Any]) -> None:
    tests_of(known.get("label"))
    sandbox.choose(str(known.get("code_sandbox", "auto")))


@REWARDS.register("code_tests")
@Capabilities(check=_check_row)
def code_tests(response: str, label: object, code_sandbox: str = "auto") -> dict[str, float]:
    """1 if the last Python block of the response (see ``code_of``) passes every test of the label.

    ``passed`` is the share of tests that pass, ``ended`` whether its time or memory ran out.

    Args:
        label: the tests, as a mapping or its JSON, in one of the forms of the field's datasets:
            ``{"inputs": [...], "outputs": [...]}``, what a program reads and must print; with
            ``"fn_name"`` what a function (or a method of ``Solution``) is given and must return; or
            a list of ``assert`` statements.
        code_sandbox: where the code runs, ``environment.code_sandbox``.

    Raises:
        UserError: for a label that is none of these.
        TransientError: if the sandbox fails, whatever the code is.
    """
    tests = tests_of(label)
    started = time.monotonic()
    expected = [target for _, target in tests]
    requests = [request for request, _ in tests]
    sizes = [8 * len(repr(target)) for target in expected]
    answers = sandbox.run(
        code_sandbox, code_of(response), requests, sizes, SECONDS, SECONDS_PER_TEST
    )
    passed = [right(answer, target) for answer, target in zip(answers, expected, strict=False)]
    checks = [
        (number, {"check": target.check, "values": answers[number]["values"]})
        for number, target in enumerate(expected[: len(answers)])
        if isinstance(target, Split)
        and not target.is_plain
        and isinstance(answers[number].get("values"), list)
    ]
    if checks:  # in a process that has not run the code
        left = max(1.0, SECONDS - (time.monotonic() - started))
        tasks = [check for _, check in checks]
        results = sandbox.run(code_sandbox, "", tasks, [0] * len(tasks), left, SECONDS_PER_TEST)
        for (number, _), result in zip(checks, results, strict=False):
            passed[number] = result.get("passed") is True
    share = sum(passed) / len(tests)
    return {
        "reward": float(share == 1.0),
        "passed": share,
        "ended": float(len(answers) < len(tests)),
    }


def code_of(response: str) -> str:
    """The last block between three backticks that is tagged as Python, or else has no tag; or all
    of the response."""
    blocks: dict[str, str] = {}
    tag: str | None = None  # of the block that the line is in
    lines: list[str] = []
    for line in response.replace("\r\n", "\n").split("\n"):
        before, fence, word = line.rpartition("```")
        word = word.strip().lower()
        if fence and (word in _PYTHON or (tag is None and "```" not in before and " " not in word)):
            tag = "python" if word in _PYTHON else word
            lines = []
        elif fence and not word and tag is not None:
            blocks[tag] = "\n".join([*lines, before.rstrip("`")])
            tag = None
        else:
            lines.append(line)
    return blocks.get("python", blocks.get("", response))


def tests_of(label: object) -> list[tuple[dict[str, Any], Any]]:
    """What the sandbox runs for each test, and what is expected of its answer."""
    tests: Any = label
    if isinstance(label, str):
        try:
            tests = json.loads(label)
        except (ValueError, RecursionError):
            tests = [label] if "assert" in label else label
    pairs: list[tuple[dict[str, Any], Any]] = []
    try:
        match tests:
            case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
                name = tests.get("fn_name")
                for given, target in zip(inputs, outputs, strict=True):
                    if not name:
                        pairs.append(({"stdin": _text(given)}, _text(target)))
                    elif isinstance(name, str):
                        pairs.append(
                            ({"call": name, "arguments": _plain(_arguments(given))}, _plain(target))
                        )
            case list() if all(isinstance(line, str) for line in tests):
                pairs = [({"steps": each.steps}, each) for each in map(split, tests)]
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(tests, dict):
            whose = tests.get("fn_name")
        else:
            whose = None
        raise UserError(
            f"reward function code_tests: the tests of {whose or 'a program'} are not JSON: {error}"
        ) from error
    if not pairs:
        raise UserError(
            f"reward function code_tests needs tests in the row's label: {{inputs: [...], outputs: [...]}} (with "
            f"fn_name, a text, for a function), or a list of assert statements; found {reprlib.repr(label)}"
        )
    return pairs


def right(answer: dict[str, Any], expected: object) -> bool:
    """Whether a test's answer is what was expected.

    A truth value is no number. Of what is printed, spaces at the ends of lines do not count.
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
        return False  # whatever the code has written in the place of an answer


def _arguments(given: object) -> list[Any]:
    """Arguments: a list of them, or one JSON value per line, as LiveCodeBench has them."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.split("\n") if line.strip()]
    if isinstance(given, list | tuple):
        return list(given)
    return [given]


def _plain(given: object) -> object:
    value: object = json.loads(json.dumps(given))
    if sandbox.is_deep(value):
        raise ValueError(f"a value has more than {sandbox.DEEPEST} levels")
    return value


def _text(given: object) -> str:
    if isinstance(given, list | tuple):
        return "\n".join(map(str, given))
    return str(given)


def _lines(text: str) -> list[str]:
    """The lines as a program ends them; other characters that Unicode calls line ends are text."""
    return [line.rstrip(" \t\r") for line in text.strip(" \t\r\n").split("\n")]
