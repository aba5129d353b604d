"""What an environment says, checked before anyone believes it.

Invariant: behind these functions an observation is text of bounded length, a reward and a metric are finite floats,
``done`` is a bool; everything else is a ``InvalidEnvOutputError`` that says what was found.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

from skyasync.envs.base import Conversation
from skyasync.errors import NonFiniteRewardError, unknown
from skyasync.inference.interface import SamplingParams

STEP_FORM = "return a dictionary with observations, reward and done (BaseTextEnvStepOutput)"
SAMPLING = frozenset(field.name for field in fields(SamplingParams))


class InvalidEnvOutputError(ValueError):
    """An environment returned something that it must not."""


def check_prompt(start: object, *, raw: bool) -> Conversation | str:
    """The first element of what ``init`` returned, as messages (or, if ``raw``, as text)."""
    if not isinstance(start, tuple) or len(start) != 2:
        raise InvalidEnvOutputError(f"init must return (conversation, info); it returned {_shown(start)}")
    return _said(start[0], "init's conversation", raw)


def check_step(output: object, *, raw: bool, most_chars: int) -> dict[str, Any]:
    """``observations``, ``reward``, ``done`` and ``sampling_params`` of what ``step`` returned."""
    if not isinstance(output, Mapping):
        raise InvalidEnvOutputError(f"step must return a dictionary; it returned {_shown(output)}: {STEP_FORM}")
    if missing := [name for name in ("observations", "reward", "done") if name not in output]:
        raise InvalidEnvOutputError(f"step's output lacks {', '.join(missing)}; it has: {', '.join(map(str, output))}")
    observations = _said(output["observations"], "step's observations", raw)
    chars = len(observations) if isinstance(observations, str) else sum(map(_chars, observations))
    if chars > most_chars:
        raise InvalidEnvOutputError(
            f"the observation has {chars:,} characters; environment.max_observation_chars={most_chars} allows no more"
        )
    return {
        "observations": observations,
        "reward": _number(output["reward"], "the reward"),
        "done": _flag(output["done"]),
        "sampling_params": _sampling(output.get("sampling_params") or {}),
    }


def check_metrics(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise InvalidEnvOutputError(f"get_metrics must return a dictionary; it returned {_shown(metrics)}")
    return {str(name): _number(value, f"the metric {name}") for name, value in metrics.items()}


def _said(messages: object, what: str, raw: bool) -> Conversation | str:
    if raw:
        if not isinstance(messages, str):
            raise InvalidEnvOutputError(
                f"{what} must be text, since the environment has raw_text; found {_shown(messages)}"
            )
        return messages
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise InvalidEnvOutputError(
            f"{what} must be a list of messages with a role and a content; found {_shown(messages)}"
        )
    return messages


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) \
        and isinstance(message.get("content"), str | list)  # fmt: skip


def _sampling(changes: Mapping[str, Any]) -> dict[str, Any]:
    for name in changes:
        if name not in SAMPLING:
            raise InvalidEnvOutputError(unknown("name in step's sampling_params", str(name), SAMPLING))
    try:
        settled = SamplingParams(**changes)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidEnvOutputError(f"step's sampling_params: {error}") from None
    return {name: getattr(settled, name) for name in changes}


def _chars(message: Mapping[str, Any]) -> int:
    """Of a message, whose content may be in parts."""
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(str(part)) for part in content)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        kind = NonFiniteRewardError if isinstance(value, Real) and not math.isfinite(value) else InvalidEnvOutputError
        raise kind(f"{what} is {_shown(value)}; it must be a finite number")
    return float(value)


def _flag(value: object) -> bool:
    try:
        if value in (True, False):  # numpy has bools of its own
            return bool(value)
    except ValueError:  # an array
        pass
    raise InvalidEnvOutputError(f"done is {_shown(value)}; it must be true or false")


def _shown(value: object) -> str:
    return reprlib.repr(value)
