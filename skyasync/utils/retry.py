"""Retries: a transient error is tried again after growing pauses, at most so often, and then raised like any other.

Each try has the time limit of the first. Pauses are spent on the caller's event loop: no thread or process is held.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

from skyasync.config.schema import EnvironmentConfig
from skyasync.errors import TransientError, headline

log = logging.getLogger(__name__)

_warned: set[str] = set()  # types of errors that this process has logged


@dataclass(frozen=True)
class RetryPolicy:
    """Args:
    tries: after the first; 0 is none.
    pause_s: before the second try, twice that before the third, and so on.
    names: of further transient errors besides ``TransientError``, with their module or without.
    """

    tries: int = 0
    pause_s: float = 1.0
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, cfg: EnvironmentConfig) -> RetryPolicy:
        """Of a run."""
        return cls(cfg.max_retries, cfg.retry_pause_s, tuple(cfg.transient_errors))

    def is_transient(self, error: BaseException) -> bool:
        """Whether an error, or what it derives from, is transient."""
        bases = type(error).__mro__
        known = {name for base in bases for name in (base.__name__, f"{base.__module__}.{base.__qualname__}")}
        return isinstance(error, TransientError) or not known.isdisjoint(self.names)

    def as_transient(self, error: Exception) -> Exception:
        """The error; as a ``TransientError`` if it is one by its name, which may not survive the way back."""
        if not self.is_transient(error) or isinstance(error, TransientError):
            return error
        transient = TransientError(f"{type(error).__qualname__}: {error}")
        for note in getattr(error, "__notes__", ()):
            transient.add_note(note)
        return transient

    async def wait(self, number: int, what: str, error: BaseException) -> bool:
        """Pause before try ``number`` (the second is 1), for a random part of the time; false if there is none."""
        if number > self.tries:
            return False
        kind = headline(error).partition(":")[0]
        if kind not in _warned:
            _warned.add(kind)
            log.warning(
                "%s has failed for now and is asked again, up to %d times (environment.max_retries); others with such "
                "an error are counted in env/retries: %s",
                what, self.tries, headline(error),
            )  # fmt: skip
        await asyncio.sleep(self.pause_s * 2 ** (number - 1) * random.uniform(0.5, 1.0))
        return True
