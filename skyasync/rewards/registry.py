"""Reward functions by name: a registered one, ``module:function``, ``path/to/file.py:function``, or a server's address.

A reward function is called with keyword arguments of which it takes the ones it names (all, with ``**extra``):
``prompt`` (the last message's text), ``response`` (what the model wrote), ``label`` (the row's), ``messages`` (the
whole conversation), and every other column of the row. It returns what ``skyasync.rewards.score`` accepts. It may
be ``async``. Functions in other systems' forms are called as they are there (``skyasync.rewards.forms``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from skyasync.registry import Registry
from skyasync.rewards.openrlhf import stand_ins
from skyasync.rewards.remote import is_remote, remote

F = TypeVar("F", bound=Callable[..., Any])

REWARDS = Registry(
    "reward function",
    [f"skyasync.rewards.{module}" for module in ("answer_match", "reasoning", "code", "instruction_following")],
    capabilities={"extra": ""},  # of this library, that installs what it needs
)


def register(name: str) -> Callable[[F], F]:
    """Make ``environment.reward_funcs=name`` mean the decorated function."""
    return REWARDS.register(name)


def quick(function: F) -> F:
    """Mark a function that returns at once whatever the response is: it is called directly, without a limit."""
    function.__dict__["quick"] = True
    return function


def loading(load: Callable[[], Any]) -> Callable[[F], F]:
    """Have ``load`` called where the decorated function is, before its first call and outside of its limit."""

    def mark(function: F) -> F:
        function.__dict__["load"] = load
        return function

    return mark


def checking(check: Callable[[Mapping[str, Any]], None]) -> Callable[[F], F]:
    """Have ``check`` called with what is known of every row that the decorated function is to judge, before the run.

    It raises ``UserError`` for a row that cannot be judged.
    """

    def mark(function: F) -> F:
        function.__dict__["check"] = check
        return function

    return mark


def find(name: str) -> Callable[..., Any]:
    """The function behind a name.

    Raises:
        UserError: if there is none, listing the nearest names.
    """
    if is_remote(name):
        return remote(name)
    if ":" not in name:
        return REWARDS.find(name)
    with stand_ins():
        return REWARDS.find(name)
