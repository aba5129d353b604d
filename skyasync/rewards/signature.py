"""How a reward function is called, and how its result is read: in this library's way, or in another
framework's.

A function's own signature decides. Those of other frameworks are in ``skyasync.interop``.

Invariant: what a function is given was read and written by the engine, tokens included, and not
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

SEEN = frozenset(
    {"queries", "prompts", "labels", "prompt_ids", "completion_ids"}
)  # known where tokens are
CODE_SANDBOX = "code_sandbox"  # environment.code_sandbox
CONVERSATION = (
    "prompt_is_conversation"  # the column that a row has whose prompt is a list of messages
)
BY_NAME = SEEN | {CODE_SANDBOX, CONVERSATION}  # what a function that takes everything is not given


class Signature:
    """This library's own, for every function without another; a subclass changes what a framework
    has differently."""

    name = ""
    #: The function needs what the engine read and wrote, not only the response's text.
    needs_tokens = False
    #: What a function that takes everything is given although it is among ``BY_NAME``.
    shown: frozenset[str] = frozenset()
    #: Whether it may return None: it gives no reward for this row.
    may_abstain = False

    def matches(self, parameters: Mapping[str, inspect.Parameter]) -> bool:
        """Whether a function with these parameters has this signature."""
        raise NotImplementedError

    def arguments(self, known: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values that the function may ask for, by the names that it has for them."""
        return known

    def with_logs(self, arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, float]]:
        """The arguments with the functions that it logs by, and the metrics, which these fill."""
        return arguments, {}

    def answer(self, returned: object) -> object:
        """What the function returned, as ``as_score`` reads it."""
        return returned


@cache
def signature_of(function: Callable[..., object]) -> Signature:
    """The signature that this function has."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = {
        name: p for name, p in inspect.signature(function).parameters.items() if p.kind in by_name
    }
    return next(
        (s for s in other_frameworks().reward_signatures() if s.matches(parameters)), Signature()
    )


def single_value(value: object) -> object:
    """A number for a tensor, array or list of one; anything else as it is, to be rejected with all
    other scores."""
    if hasattr(value, "tolist"):  # tensors and arrays, whatever their library
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool | int):
        return float(value)
    return value


def seen(
    read: str, wrote: str, prompt_ids: list[int], completion_ids: list[int], label: object
) -> dict[str, object]:
    """What is known of a turn whose tokens are."""
    texts = {"queries": [read + wrote], "prompts": [read], "labels": [label]}
    return {**texts, "prompt_ids": prompt_ids, "completion_ids": completion_ids}


# ---------------------------------------------------------------- results

REWARD_KEYS = ("reward", "score")
# of a mapping; each becomes a metric of the run
MOST_NUMBERS = 256
LONGEST_NAME = 200


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
    """The score of a function, by the rules of its signature; ``logged``: what it has logged
    meanwhile."""
    result = signature.answer(returned)
    if signature.may_abstain and result is None:
        return Score(0.0, applies=False)
    score = as_score(name, result)
    numbers = {
        key: _number(f"{key!r}, logged by reward function {name},", value)
        for key, value in logged.items()
    }
    return replace(score, metrics=score.metrics | numbers)


def as_score(function: str, returned: object) -> Score:
    """A number, or a mapping with ``reward`` (or ``score``) and further numbers, which become
    metrics.

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
    numbers = {
        str(name): _number(f"{name!r} of reward function {function}", v)
        for name, v in returned.items()
    }
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


def _number(what: str, value: object, alternative: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
        if isinstance(value, bool):
            hint = f"write float({value})"
        else:
            hint = "it must be a finite number" + alternative
        kind = (
            NonFiniteRewardError if isinstance(value, Real) and not _is_finite(value) else UserError
        )
        if isinstance(value, int) and not _is_finite(value):
            # Python does not write one of 5,000 digits
            text = f"an integer of {value.bit_length()} bits"
        else:
            text = repr(value)
        raise kind(f"{what} is {text if len(text) <= 80 else f'{text[:77]}...'}: {hint}")
    return float(value)
