"""The folder of one run: its files, the lock of the command that trains in it, and its status.

Invariant: two runs never share a folder unless the second one resumes the first. A resumed run
replaces what the interrupted run had written after the point of resuming; nothing is doubled. A
status is never better than the truth: a run whose process is gone without a word is "lost", not
running. If it cannot be written, that is a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from skyasync.config.secrets import Secrets
from skyasync.errors import UserError
from skyasync.observability import jsonl
from skyasync.observability.jsonl import replace_text
from skyasync.processes import born

log = logging.getLogger(__name__)

OWNER_ALONE = 0o700  # prompts, samples and weights are private to the user
LOCK = "lock"  # held by the one command that trains in the folder
#: Errors of file systems without locks.
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

#: Descriptors of the lock files, by folder. POSIX releases the lock of a process when it closes any
#: descriptor of the file, so that a folder is opened once.
_locked: dict[Path, int] = {}


def default_run_name(plan: str) -> str:
    """``one_step_off-20260801-142305``: sorts by plan, then by local time."""
    return f"{plan}-{time.strftime('%Y%m%d-%H%M%S')}"


def shown(path: Path) -> str:
    """The path relative to the working folder if it is inside, else absolute."""
    path = path.absolute()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)


def check_name(root: Path | str, name: str) -> Path:
    """The absolute ``root``.

    Raises:
        UserError: for a name that is empty or leads out of it.
    """
    root = Path(root).expanduser().resolve()
    folder = (root / name).resolve()  # follows "..", absolute names and symbolic links
    if not name.strip() or folder == root or not folder.is_relative_to(root):
        raise UserError(f"run name {name!r} must name a folder inside {root}")
    return root


class RunDirectory:
    """``<root>/<name>/``, made on construction.

    Args:
        root: the folder that holds the runs.
        name: the run's name; if it is taken, ``-2``, ``-3``, ... is added.
        resume: use exactly ``name``, whether it exists or not.

    Attributes:
        origins: who has set each setting; see ``skyasync.config.load.origins``.
        eval_samples: of evaluations, in the form of ``samples``.
        ledger: how every prompt ended; see ``skyasync.trainer.extensions.prompt_ledger.audit``.
        logs: what the run's processes have printed.
        error: what ended the run, if an error did: the whole traceback.
        secrets: replaced in every file of the run.

    Raises:
        UserError: for a name that is empty or leads out of ``root``.
    """

    def __init__(self, root: Path | str, name: str, *, resume: bool = False) -> None:
        requested = check_name(root, name) / name
        path = requested
        self._new = not (resume and path.exists())
        numbers = itertools.count(2)
        while not resume:
            try:
                path.mkdir(OWNER_ALONE, parents=True)  # safe if two runs start at once
                break
            except FileExistsError:
                path = requested.with_name(f"{requested.name}-{next(numbers)}")
        path.mkdir(OWNER_ALONE, parents=True, exist_ok=True)
        self.path = path
        self.name = path.name
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.eval_samples = path / "eval_samples.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.config = path / "config.yaml"
        self.origins = path / "origins.json"
        self.timeline = path / "timeline.json"
        self.reward_plot = path / "reward.png"
        self.error = path / "error.txt"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.secrets = Secrets()
        # Files already cut back to the step at which this run began.
        self._rewound: set[Path] = set()
        # Rows of the ledger, in step order.
        self._unwritten: list[tuple[int, Mapping[str, Any]]] = []

    def save_error(self, traceback: str) -> None:
        """Write ``error.txt``; a full disk is only a warning."""
        try:
            self.error.write_text(self.secrets.hide_all(traceback), encoding="utf-8")
        except OSError as problem:  # the user must see the error of the run, not this one
            with suppress(OSError):
                self.error.unlink(missing_ok=True)  # half a traceback misleads
            log.warning("%s was not written: %s", shown(self.error), problem)

    def discard(self) -> None:
        """Remove the folder, if it is new: the run has not started."""
        if self._new:
            shutil.rmtree(self.path, ignore_errors=True)

    def write_samples(
        self, step: int, records: Iterable[Mapping[str, Any]], *, evaluation: bool = False
    ) -> None:
        """Append one line per record, ``step`` first."""
        rows = []
        for record in records:
            row = dict(record)
            for name, value in record.items():
                if isinstance(value, str):
                    row[name] = self.secrets.hide(value)
            rows.append(row)
        self._append(self.eval_samples if evaluation else self.samples, step, rows)

    def write_ledger(self, step: int, ended: Mapping[str, Any]) -> None:
        """Append how the prompts of a step ended.

        Rows that a full disk rejects are written with a later step.
        """
        self._unwritten.append((step, ended))
        while self._unwritten:
            oldest_step, row = self._unwritten[0]
            self._append(self.ledger, oldest_step, [row])
            self._unwritten.pop(0)  # only now: an error leaves the row for a later call

    def _append(self, file: Path, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append to a file.

        The first call of a resumed run drops the lines from ``step`` on, as these steps are redone.
        """
        if file not in self._rewound:
            if file.exists():
                old_rows = [row for row in jsonl.read_rows(file) if row["step"] < step]
                jsonl.write_rows(file, old_rows)
            self._rewound.add(file)
        jsonl.append_rows(file, ({"step": step, **record} for record in records))


def lock_run(folder: Path) -> None:
    """Lock the folder until ``unlock_run``; a process may lock its own folder again.

    The lock belongs to the kernel, so it ends with this process, however the process ends. Neither
    forks nor subprocesses inherit it. What stands in the file is only for people.

    Raises:
        UserError: if another process trains there, naming the process.
    """
    if folder in _locked:
        return
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as problem:  # a full disk, which the run will report
        log.warning("%s is not guarded against a second command: %s", folder, problem)
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        content = os.read(file, 4096)
        os.close(file)
        if problem.errno in WITHOUT_LOCKS:
            log.warning(
                "%s is not guarded against a second command, its file system has no locks: %s",
                folder,
                problem,
            )
            return
        raise UserError(
            f"{folder} is in use: {_holder(content)}; wait for it, end it, or give this run another trainer.run_name"
        ) from None
    _locked[folder] = file
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    with suppress(OSError):  # a full disk: the lock holds without its text
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)


def _holder(content: bytes) -> str:
    """The process that holds a lock, by the content of the lock file."""
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} trains there since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # it has only just locked it
        return "another process trains there"


def unlock_run(folder: Path) -> None:
    """Release the lock, if this process holds it."""
    file = _locked.pop(folder, None)
    if file is not None:
        with suppress(OSError):
            os.ftruncate(file, 0)  # before the lock is released: the next holder writes its text
        os.close(file)


STATUS = "status.json"
RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
LOST = "lost"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Status:
    """The content of ``status.json``; times are seconds since 1970, 0 if unknown."""

    state: str = UNKNOWN
    began: float = 0.0
    ended: float = 0.0
    pid: int = 0
    born: str = ""  # tells the process from others that have the same number before or after it
    host: str = ""
    reason: str = ""  # why it ended before its last step
    engine: str = ""  # the inference engine, and why it was chosen

    @property
    def over(self) -> bool:
        return self.state != RUNNING


@contextlib.contextmanager
def status_file(folder: Path, engine: str = "", began_s: float | None = None) -> Iterator[None]:
    """Write that the run continues, and after the block how it ended.

    Args:
        began_s: seconds since 1970 when the run began, which includes its checks; by default now.
    """
    began = round(time.time() if began_s is None else began_s, 3)
    pid = os.getpid()
    host = socket.gethostname()
    status = Status(
        RUNNING,
        began=began,
        pid=pid,
        born=born(pid),
        host=host,
        engine=engine,
    )
    _write(folder, status)
    state = FAILED
    try:
        yield
        state = FINISHED
    except (KeyboardInterrupt, SystemExit):
        state = STOPPED
        raise
    finally:
        reason = read_status(folder).reason  # of ``give_reason``, in another process
        _write(folder, replace(status, state=state, ended=round(time.time(), 3), reason=reason))


def give_reason(folder: Path, reason: str) -> None:
    """Write why the run ends before its last step."""
    _write(folder, replace(read_status(folder), reason=reason))


def read_status(folder: Path) -> Status:
    """The content of ``status_file``; for a folder without one, what its other files show."""
    try:
        values = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        # A newer version may have written more fields.
        fields = {name: values[name] for name in Status.__dataclass_fields__ if name in values}
        status = Status(**fields)
    except (OSError, ValueError, TypeError):
        return Status(FAILED if (folder / "error.txt").exists() else UNKNOWN)
    # Processes of another machine cannot be seen.
    if status.state == RUNNING and status.host == socket.gethostname() and not _exists(status):
        return replace(status, state=LOST)
    return status


def _exists(status: Status) -> bool:
    """Whether the run's process exists, and is not a later one with the same number.

    Numbers return after the restart of a container, for example.
    """
    now = born(status.pid)
    if now:
        return status.born == now
    try:
        os.kill(status.pid, 0)
    except PermissionError:  # of another user, whose processes are hidden
        return True
    except ProcessLookupError:
        return False
    # Not readable any more, though it exists: a process that has ended, and waits for its parent.
    return False


def _write(folder: Path, status: Status) -> None:
    try:
        replace_text(folder / STATUS, json.dumps(asdict(status)) + "\n")
    except OSError as error:
        log.warning("%s was not written: %s", folder / STATUS, error)
