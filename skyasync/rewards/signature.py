"""Calls of reward functions and their results, by this library's rules or another framework's.

A function's own signature decides. Those of other frameworks are in ``skyasync.interop``.

Invariant: the tokens that a function gets are those that the engine read and wrote, and were not
made again from text. After ``as_score`` a reward and its metrics are finite floats; anything else
has raised an error with the function's name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from typing import Any, cast

from skyasync.errors import NonFiniteRewardError, UserError, nearest
from skyasync.other_frameworks import other_frameworks

#: A reward function, of the library or the user.
Function = Callable[..., Any]
#: What reward functions may take, by name: the row's columns, ``prompt``, ``messages``,
#: ``response``, ``label``, and further ones below.
Inputs = Mapping[str, Any]
#: Inputs that exist only if the episode has the engine's tokens.
SEEN = frozenset({"queries", "prompts", "labels", "prompt_ids", "completion_ids"})
CODE_SANDBOX = "code_sandbox"  # the input with the setting environment.code_sandbox
#: A column of rows whose prompt is a list of messages.
CONVERSATION = "prompt_is_conversation"
#: Inputs for functions that name them. A function with ``**extra`` does not get them.
BY_NAME = SEEN | {CODE_SANDBOX, CONVERSATION}


class Signature:
    """The rules of this library; a subclass has those of another framework."""

    name = ""
    #: The function needs the engine's tokens, not only the response's text.
    needs_tokens = False
    #: Inputs among ``BY_NAME`` that a function with ``**extra`` gets nevertheless.
    shown: frozenset[str] = frozenset()
    #: Whether it may return None: it gives no reward for this row.
    may_abstain = False

    def matches(self, parameters: Mapping[str, inspect.Parameter]) -> bool:
        """Whether a function with these parameters has this signature."""
        raise NotImplementedError

    def arguments(self, inputs: Inputs) -> Inputs:
        """The inputs that the function may take, by the framework's names."""
        return inputs

    def with_logs(self, arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, float]]:
        """The arguments with the framework's logging functions, and the metrics that these fill."""
        return arguments, {}

    def answer(self, returned: object) -> object:
        """The returned value in a form that ``as_score`` reads."""
        return returned


@cache
def signature_of(function: Callable[..., object]) -> Signature:
    """The rules by which a function is called: the first that match its parameters."""
    parameters = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            parameters[name] = parameter
    for signature in other_frameworks().reward_signatures():
        if signature.matches(parameters):
            return signature
    return Signature()


def single_value(value: object) -> object:
    """The number in a tensor, array or list of one; any other value unchanged."""
    if hasattr(value, "tolist"):  # tensors and arrays, without importing their libraries
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool | int):
        return float(value)
    return value


def seen(
    read: str, wrote: str, prompt_ids: list[int], completion_ids: list[int], label: object
) -> dict[str, object]:
    """The inputs ``SEEN`` of a turn; ``queries``, ``prompts`` and ``labels`` are lists of one."""
    return {
        "queries": [read + wrote],
        "prompts": [read],
        "labels": [label],
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
    }


# ---------------------------------------------------------------- results

REWARD_KEYS = ("reward", "score")
# Each entry of a mapping becomes a metric of the run, which is one column and one plot.
MOST_NUMBERS = 256
LONGEST_NAME = 200  # characters of a metric's name


@dataclass(frozen=True)
class Score:
    """The result of one function, not yet weighted.

    Args:
        no_reward: the function timed out or failed; its reward counts as 0.
        applies: the function applies to this row; if not, its reward counts as 0 and is not a
            metric.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    no_reward: bool = False
    applies: bool = True


def call(name: str, function: Callable[..., object], arguments: Mapping[str, Any]) -> Score:
    """Call a function, and read its result by the rules of its signature."""
    signature = signature_of(function)
    arguments, logged = signature.with_logs(arguments)
    return read_result(name, signature, function(**arguments), logged)


def read_result(
    name: str, signature: Signature, returned: object, logged: Mapping[str, Any]
) -> Score:
    """The score of a function by the rules of its signature; ``logged``: metrics of the call."""
    result = signature.answer(returned)
    if signature.may_abstain and result is None:
        return Score(0.0, applies=False)
    score = as_score(name, result)
    metrics = dict(score.metrics)
    for key, value in logged.items():
        metrics[key] = _number(f"{key!r}, logged by reward function {name},", value)
    return replace(score, metrics=metrics)


def as_score(function: str, returned: object) -> Score:
    """The score in a returned number, or in a mapping with ``reward`` (or ``score``).

    Further numbers of a mapping become metrics.

    Raises:
        UserError: naming the function and what it returned.
    """
    if not isinstance(returned, Mapping):
        return Score(
            _number(f"reward function {function}", returned, " or a mapping with the key 'reward'")
        )
    _check_names(function, returned)
    key = next((key for key in REWARD_KEYS if key in returned), None)
    if key is None:
        close = nearest("reward", map(str, returned), count=1)
        if close:
            hint = f" (did you mean 'reward' by {close[0]!r}?)"
        else:
            hint = ""
        raise UserError(
            f"reward function {function} returned a mapping without 'reward' or 'score'{hint}; it has: "
            f"{', '.join(map(str, returned)) or 'nothing'}"
        )
    numbers = {}
    for name, value in returned.items():
        numbers[str(name)] = _number(f"{name!r} of reward function {function}", value)
    reward = numbers.pop(key)
    return Score(reward, numbers)


def _check_names(function: str, returned: Mapping[object, object]) -> None:
    """Raises UserError for more numbers than a run can plot, or names that no metric can have."""
    if len(returned) > MOST_NUMBERS:
        raise UserError(
            f"reward function {function} returned {len(returned)} numbers; {MOST_NUMBERS} are the most"
        )
    for name in returned:
        text = str(name)
        if len(text) > LONGEST_NAME or not text.isprintable():
            raise UserError(
                f"reward function {function} returned a number named {text[:LONGEST_NAME]!r}, which is no metric's "
                f"name: it has {len(text)} characters ({LONGEST_NAME} printable ones are the most)"
            )


def _is_finite(value: object) -> bool:
    """Whether a real number fits into a float."""
    try:
        return math.isfinite(cast(float, value))
    except OverflowError:
        return False


def _number(subject: str, value: object, alternative: str = "") -> float:
    """The value as a float.

    Raises:
        NonFiniteRewardError: for a real number that is not finite, or too large for a float.
        UserError: for any other value.
    """
    if isinstance(value, bool):  # a bool is an int in Python, and often a mistake here
        raise UserError(f"{subject} is {value}: write float({value})")
    hint = "it must be a finite number" + alternative
    if isinstance(value, Real):
        if _is_finite(value):
            return float(value)
        if isinstance(value, int):
            # Python refuses to write an integer of more than 4,300 digits.
            text = f"an integer of {value.bit_length()} bits"
        else:
            text = repr(value)
        raise NonFiniteRewardError(f"{subject} is {_shortened(text)}: {hint}")
    raise UserError(f"{subject} is {_shortened(repr(value))}: {hint}")


def _shortened(text: str) -> str:
    if len(text) <= 80:
        return text
    return f"{text[:77]}..."
