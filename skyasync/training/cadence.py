"""When something is due that is not done in every step: by steps, by minutes, or by both.

Invariant: minutes count from the last time that it was done, on the event loop's clock, so this holds on virtual time.
"""

from __future__ import annotations

from collections.abc import Callable

from skyasync.config.schema import TrainerConfig


class Due:
    """Every so many steps, and when so many minutes have passed since the last time; 0 is never."""

    def __init__(self, steps: int, minutes: float, now: Callable[[], float]) -> None:
        self._steps, self._seconds, self._now = steps, 60 * minutes, now
        self._last: float | None = None

    def begin(self) -> None:
        """The minutes count from here."""
        self._last = self._now()

    def __call__(self, step: int) -> bool:
        """Whether it is due behind this step; if so, it is taken for done."""
        late = bool(self._seconds) and self._last is not None and self._now() - self._last >= self._seconds
        if not (late or (self._steps > 0 and step % self._steps == 0)):
            return False
        self.begin()
        return True


class Cadence:
    """What a run does now and then."""

    def __init__(self, cfg: TrainerConfig, now: Callable[[], float]) -> None:
        self.evaluation = Due(cfg.eval_interval, cfg.eval_minutes, now)
        self.checkpoint = Due(cfg.ckpt_interval, cfg.ckpt_minutes, now)
        self.export = Due(cfg.export_interval, 0.0, now)

    def begin(self) -> None:
        """The first step begins."""
        self.evaluation.begin()
        self.checkpoint.begin()
