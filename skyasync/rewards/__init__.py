"""Reward functions by name: registered, ``module:function``, ``file.py:function``, or an address.

A reward function is called with keyword arguments of which it takes the ones it names (all, with
``**extra``): ``prompt`` (the last message's text), ``response`` (what the model wrote), ``label``
(the row's), ``messages`` (the whole conversation), and every other column of the row. It returns
what ``as_score`` accepts. It may be ``async``. Functions with other frameworks' signatures are
called as they are there (``skyasync.rewards.signature``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from skyasync.other_frameworks import other_frameworks
from skyasync.registry import Registry, declared
from skyasync.rewards.signature import Function, Inputs, Score

F = TypeVar("F", bound=Function)

REWARDS = Registry(
    "reward function",
    {
        "skyasync.rewards.answer_match": "exact_match gsm8k gsm8k_format multiple_choice zero math_verify",
        "skyasync.rewards.reasoning": "reasoning_gym",
        "skyasync.rewards.code": "code_tests",
        "skyasync.rewards.instruction_following": (
            "instruction_following instruction_following_loose instruction_following_share"
        ),
    },
    capabilities={"extra": ""},  # the optional dependency of skyasync that installs its packages
)


def register(name: str) -> Callable[[F], F]:
    """Make ``environment.reward_funcs=name`` mean the decorated function."""
    return REWARDS.register(name)


@dataclass(frozen=True)
class Capabilities:
    """Properties of a reward function that decide how it is called; a decorator.

    Args:
        quick: it returns at once whatever the response is: it is called directly, without a limit.
        load: called in the process of the function, before its first call and outside of its limit.
        check: called with the inputs of every row of the function, before the run. It raises
            ``UserError`` for a row that cannot be rewarded.
    """

    quick: bool = False
    load: Callable[[], Any] = lambda: None
    check: Callable[[Inputs], None] = lambda inputs: None

    def __call__(self, function: F) -> F:
        function.__dict__["capabilities"] = self  # where ``capabilities_of`` looks for it
        return function


def capabilities_of(function: Function) -> Capabilities:
    """The capabilities of a function, which may be any callable of the user's."""
    capabilities: Capabilities = declared(function, "capabilities", Capabilities())
    return capabilities


def quick(function: F) -> F:
    """Mark a function that returns at once whatever the response is.

    It is called directly, without a time limit.
    """
    return Capabilities(quick=True)(function)


def is_remote(name: str) -> bool:
    """Whether a name is the address of a reward server, or several with commas."""
    return name.startswith(("http://", "https://"))


def find(name: str) -> Function:
    """The function behind a name.

    Raises:
        UserError: if there is none, listing the nearest names.
    """
    if is_remote(name):
        return other_frameworks().remote_reward(name)
    if ":" not in name:
        return REWARDS.find(name)
    # A file written for another framework may import modules of it that are not installed here.
    with other_frameworks().modules_for_user_files():
        return REWARDS.find(name)


__all__ = ["REWARDS", "Score", "quick", "register"]
