"""What a reward function may return.

Invariant: after ``as_score`` a reward and its metrics are finite floats; anything else has raised an error
with the function's name.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from skyasync.errors import NonFiniteRewardError, UserError, nearest
from skyasync.rewards.signature import signature_of

REWARD_KEYS = ("reward", "score")


@dataclass(frozen=True)
class Score:
    """The result of one function, not yet weighted.

    Args:
        no_reward: the function timed out or failed; its reward counts as 0.
        applies: the function applies to this row; if not, its reward counts as 0 and is not a metric.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    no_reward: bool = False
    applies: bool = True


def call(name: str, function: Callable[..., object], arguments: Mapping[str, Any]) -> Score:
    """Call a function, and read its result by the rules of its signature."""
    arguments, logged = signature_of(function).with_logs(arguments)
    return _read(name, function, function(**arguments), logged)


async def call_async(name: str, function: Callable[..., Awaitable[object]], arguments: Mapping[str, Any]) -> Score:
    """``call`` for a coroutine function."""
    arguments, logged = signature_of(function).with_logs(arguments)
    return _read(name, function, await function(**arguments), logged)


def _read(name: str, function: Callable[..., object], returned: object, logged: Mapping[str, Any]) -> Score:
    signature = signature_of(function)
    result = signature.answer(returned)
    if signature.may_abstain and result is None:
        return Score(0.0, applies=False)
    score = as_score(name, result)
    numbers = {key: _number(f"{key!r}, logged by reward function {name},", value) for key, value in logged.items()}
    return replace(score, metrics=score.metrics | numbers)


def as_score(function: str, returned: object) -> Score:
    """A number, or a mapping with ``reward`` (or ``score``) and further numbers, which become metrics.

    Raises:
        UserError: naming the function and what it returned.
    """
    if not isinstance(returned, Mapping):
        return Score(_number(f"reward function {function}", returned, " or a mapping with the key 'reward'"))
    key = next((key for key in REWARD_KEYS if key in returned), None)
    if key is None:
        close = nearest("reward", map(str, returned), count=1)
        hint = f" (did you mean 'reward' by {close[0]!r}?)" if close else ""
        raise UserError(
            f"reward function {function} returned a mapping without 'reward' or 'score'{hint}; it has: "
            f"{', '.join(map(str, returned)) or 'nothing'}"
        )
    numbers = {str(name): _number(f"{name!r} of reward function {function}", v) for name, v in returned.items()}
    reward = numbers.pop(key)
    return Score(reward, numbers)


def _number(what: str, value: object, alternative: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        hint = f"write float({value})" if isinstance(value, bool) else "it must be a finite number" + alternative
        kind = NonFiniteRewardError if isinstance(value, Real) and not math.isfinite(value) else UserError
        text = repr(value)
        raise kind(f"{what} is {text if len(text) <= 80 else f'{text[:77]}...'}: {hint}")
    return float(value)
