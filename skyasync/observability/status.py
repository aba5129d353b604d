"""Whether a run goes on, and how it ended: ``status.json`` in its folder.

Invariant: what is read is never better than the truth: a run whose process is gone without a word is "lost", not
running. A status that cannot be written costs a line in a list, never the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skyasync.observability.jsonl import replace_text

NAME = "status.json"
RUNNING, FINISHED, STOPPED, FAILED, LOST, UNKNOWN = "running", "finished", "stopped", "failed", "lost", "unknown"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """``began`` and ``ended`` are seconds since 1970, 0 if unknown; ``reason``: why it ended before its last step;
    ``engine``: the inference engine, and why it was chosen."""

    state: str = UNKNOWN
    began: float = 0.0
    ended: float = 0.0
    pid: int = 0
    host: str = ""
    reason: str = ""
    engine: str = ""

    @property
    def over(self) -> bool:
        return self.state != RUNNING


@contextlib.contextmanager
def status_file(folder: Path, engine: str = "") -> Iterator[None]:
    """Write that the run goes on, and after the block how it ended."""
    began = round(time.time(), 3)
    status = Status(RUNNING, began=began, pid=os.getpid(), host=socket.gethostname(), engine=engine)
    _write(folder, status)
    state = FAILED
    try:
        yield
        state = FINISHED
    except (KeyboardInterrupt, SystemExit):
        state = STOPPED
        raise
    finally:
        reason = read_status(folder).reason
        _write(folder, replace(status, state=state, ended=round(time.time(), 3), reason=reason))


def give_reason(folder: Path, reason: str) -> None:
    """Why the run ends before its last step."""
    _write(folder, replace(read_status(folder), reason=reason))


def read_status(folder: Path) -> Status:
    """The content of ``status_file``; for a folder without one, what its other files show."""
    try:
        values = json.loads((folder / NAME).read_text(encoding="utf-8"))
        status = Status(**{name: values[name] for name in Status.__dataclass_fields__ if name in values})
    except (OSError, ValueError, TypeError):
        return Status(FAILED if (folder / "error.txt").exists() else UNKNOWN)
    if status.state == RUNNING and status.host == socket.gethostname():
        try:
            os.kill(status.pid, 0)
        except ProcessLookupError:
            return replace(status, state=LOST)
        except PermissionError:  # of another user, and alive
            pass
    return status


def _write(folder: Path, status: Status) -> None:
    try:
        replace_text(folder / NAME, json.dumps(asdict(status)) + "\n")
    except OSError as error:
        logger.warning("%s was not written: %s", folder / NAME, error)
