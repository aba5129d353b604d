"""Reward functions in processes of their own, since they read what a model wrote.

Invariant: a call returns a score or raises within its limit, and the next one finds a working process, which has loaded
every function that was loaded before.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyasync.processes.apart import Apart
from skyasync.processes.pool import Pool
from skyasync.rewards.registry import find
from skyasync.rewards.score import Score, call

JUDGES = 8  # processes at most: a response that takes its whole limit must not hold up all others


class Judge:
    """Calls functions, also from several threads at once; a function is what ``portable`` made."""

    def __init__(self) -> None:
        self._loaded: dict[bytes, str] = {}
        self._pool: Pool[Apart] = Pool(self._start, JUDGES)

    def load(self, name: str, function: bytes) -> None:
        """Import the function's module, here for this process and ahead for all that are to come.

        Raises:
            UserError: if it cannot be loaded.
        """
        with self._pool.alone() as process:
            process.load(f"reward function {name}", function)
        self._loaded[function] = f"reward function {name}"

    def call(self, name: str, function: bytes, arguments: dict[str, Any], limit_s: float) -> Score:
        """The function's score; for what it raises see ``Apart.call``."""
        if function not in self._loaded:
            self.load(name, function)
        while True:
            with self._pool.alone() as process:
                if process.is_quiet:
                    score: Score = process.call(f"reward function {name}", function, arguments, limit_s)
                    return score

    def close(self) -> None:
        """Kill the processes. The next call starts others."""
        self._pool.close()

    def _start(self, look_at: Callable[[Apart], None]) -> Apart:
        return Apart([(name, function) for function, name in self._loaded.items()], look_at)


@dataclass(frozen=True)
class _Verdict:
    """A function whose answer is read where it is given; it travels by its name where other processes know that."""

    name: str
    function: Callable[..., Any]

    def __call__(self, **arguments: object) -> Score:
        return call(self.name, self.function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_found, (self.name,)) if _known_everywhere(self) else (_Verdict, (self.name, self.function))


def portable(function: Callable[..., Any], name: str) -> bytes:
    """What another process finds the function by: its name, or, for one that the program registered, itself."""
    verdict = _Verdict(name, function)
    if _known_everywhere(verdict):
        return pickle.dumps(verdict)
    from ray import cloudpickle  # also for functions of the program's own file

    return cloudpickle.dumps(verdict)


def _known_everywhere(verdict: _Verdict) -> bool:
    return ":" in verdict.name or getattr(verdict.function, "__module__", "").startswith("skyasync.rewards.")


def _found(name: str) -> _Verdict:
    function = find(name)
    getattr(function, "load", lambda: None)()
    return _Verdict(name, function)
