"""Whether the controller's process still answers the program that watches it.

Invariant: what counts is the time spent asking in vain, so a program that was itself stopped blames nobody for that.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

import ray

from skyasync.utils.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from ray import ObjectRef

    from skyasync.observe.progress import ProgressReport

ASK_S = 10.0  # for an answer


class Asked(Protocol):
    """A method of an actor, as whoever holds its handle calls it."""

    def remote(self, seen: int) -> ObjectRef[ProgressReport]: ...


class Pulse:
    """Whether the controller answers.

    Args:
        ask: its method, which says what is new since a step.
        limit_s: it is killed when it has not for so long; 0: never.
    """

    def __init__(self, ask: Asked, process: ProcessIdentity, limit_s: float) -> None:
        self._ask, self._process, self._limit_s = ask, process, limit_s
        self._each_s = min(ASK_S, limit_s / 2) if limit_s else ASK_S
        self._silent_s = 0.0

    def ask(self, seen: int) -> ProgressReport | None:
        """What is new since that step; None if it does not say."""
        try:
            report: ProgressReport = ray.get(self._ask.remote(seen), timeout=self._each_s)
            self._silent_s = 0.0
            return report
        except ray.exceptions.GetTimeoutError:
            self._silent_s += self._each_s
            if self._limit_s and self._silent_s >= self._limit_s:
                told = f"the controller gave no sign of life for {self._silent_s:g} s (trainer.heartbeat_timeout_s)"
                print(f"{told}: it is ended", file=sys.stderr)
                self._process.end()
        except ray.exceptions.RayError:  # its end, which ``run`` tells of
            pass
        return None
