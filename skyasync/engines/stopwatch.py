"""Seconds for which something was the case."""

from __future__ import annotations

import time


class Stopwatch:
    """Counts while switched on; reading it does not stop it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def on(self) -> bool:
        return self._since is not None

    @property
    def seconds(self) -> float:
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def switch(self, on: bool) -> None:
        if on == self.on:
            return
        self._seconds, self._since = self.seconds, (time.perf_counter() if on else None)
