"""How a reward function is called, and how its result is read: in this library's way, or in another framework's.

A function's own signature decides. Those of other frameworks are in ``skyasync.interop``.

Invariant: what a function is given was read and written by the engine, tokens included, and not made again from text.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from skyasync.other_frameworks import other_frameworks

SEEN = frozenset({"queries", "prompts", "labels", "prompt_ids", "completion_ids"})  # known where tokens are
CODE_SANDBOX = "code_sandbox"  # environment.code_sandbox
CONVERSATION = "prompt_is_conversation"  # the column that a row has whose prompt is a list of messages
BY_NAME = SEEN | {CODE_SANDBOX, CONVERSATION}  # what a function that takes everything is not given


class Signature:
    """This library's own, for every function without another; a subclass changes what a framework has differently."""

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
        """What the function returned, as ``skyasync.rewards.score`` reads it."""
        return returned


@cache
def signature_of(function: Callable[..., object]) -> Signature:
    """The signature that this function has."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in by_name}
    return next((s for s in other_frameworks().reward_signatures() if s.matches(parameters)), Signature())


def wrong_return(function: Callable[..., object]) -> str:
    """What every way out of it returns, if that is nothing (as the way past its last line does) or a tuple; else ""."""
    code = getattr(function, "__code__", None)
    steps = list(dis.get_instructions(code)) if code else []
    returns = [i for i, step in enumerate(steps) if step.opname in ("RETURN_VALUE", "RETURN_CONST")]
    values = [steps[i] if steps[i].opname == "RETURN_CONST" else steps[i - 1] for i in returns]
    constants = [step.argval if step.opname.endswith("_CONST") else ... for step in values]
    if values and all(constant is None for constant in constants):
        return "nothing"
    tuples = [s.opname == "BUILD_TUPLE" or isinstance(c, tuple) for s, c in zip(values, constants, strict=True)]
    return "a tuple" if tuples and all(tuples) else ""


def single_value(value: object) -> object:
    """A number for a tensor, array or list of one; anything else as it is, to be rejected with all other scores."""
    if hasattr(value, "tolist"):  # tensors and arrays, whatever their library
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, bool | int) else value


def seen(read: str, wrote: str, prompt_ids: list[int], completion_ids: list[int], label: object) -> dict[str, object]:
    """What is known of a turn whose tokens are."""
    texts = {"queries": [read + wrote], "prompts": [read], "labels": [label]}
    return {**texts, "prompt_ids": prompt_ids, "completion_ids": completion_ids}
