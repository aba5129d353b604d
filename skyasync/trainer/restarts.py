"""Processes that failed and were started again: ``restarts.jsonl`` in the run's folder, and how often that may be.

Invariant: workers and the controller draw on one budget, ``trainer.max_restarts`` in an hour of one command, whichever
process counts. What is started again resumes from a checkpoint that this command has written, or, while there is none,
from where it began.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from skyasync.config.resume import written_ns
from skyasync.errors import headline
from skyasync.observability.jsonl import append_rows, read_rows

log = logging.getLogger(__name__)

NAME = "restarts.jsonl"
HOUR_S = 3600.0


@dataclass
class Restarts:
    """Of one command.

    Args:
        folder: the run's.
        per_hour: 0 is none.
        began: seconds since 1970.
    """

    folder: Path
    per_hour: int
    began: float = field(default_factory=time.time)
    _taken: list[float] = field(default_factory=list)  # by this process, should the file not be written

    def take(self, what: str, step: int, error: BaseException) -> bool:
        """Count one, after ``step``; false if the budget of the hour is used, which is added to the error as a note."""
        used = self.used()
        if used >= self.per_hour:
            if self.per_hour:
                error.add_note(f"{what} is not started again: {used} of {self.per_hour} restarts this hour are used "
                               f"(trainer.max_restarts)")  # fmt: skip
            return False
        now = time.time()
        self._taken.append(now)
        row = {"step": step, "time": now, "what": what, "error": headline(error)}
        try:
            append_rows(self.folder / NAME, [row])
        except OSError as problem:
            log.warning("%s was not written: %s", self.folder / NAME, problem)
        log.warning("%s has died behind step %d and is started again (%d of %d this hour): %s",
                    what, step, used + 1, self.per_hour, headline(error))  # fmt: skip
        return True

    def used(self) -> int:
        """In the last hour."""
        since = max(self.began, time.time() - HOUR_S)
        written = [row["time"] for row in read_rows(self.folder / NAME)]
        return max(sum(when >= since for when in times) for times in (written, self._taken))

    def resume_mode(self, checkpoints: Path, first: str) -> str:
        """What ``trainer.resume_mode`` is from here on, if it was ``first`` when the command began."""
        folders = (path for path in checkpoints.glob("step_*") if not path.suffix)
        return "latest" if any((written_ns(path) or 0) >= self.began * 1e9 for path in folders) else first
