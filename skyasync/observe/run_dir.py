"""The folder of one run, its files, and the lock of the one command that trains in it.

Invariant: two runs never share a folder unless the second one resumes the first. A resumed run replaces what the
interrupted run had written after the point of resuming; nothing is doubled.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyasync.config.secrets import Secrets
from skyasync.errors import UserError
from skyasync.observability import jsonl

log = logging.getLogger(__name__)

OWNER_ALONE = 0o700  # prompts, samples and weights are private to the user
LOCK = "lock"  # held by the one command that trains in the folder
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # raised by file systems without locks

_locked: dict[Path, int] = {}  # descriptors of this process: closing a lock file anywhere would release the lock


def default_run_name(plan: str) -> str:
    """``one_step_off-20260801-142305``: sorts by plan, then by local time."""
    return f"{plan}-{time.strftime('%Y%m%d-%H%M%S')}"


def shown(path: Path) -> str:
    """The path relative to the working folder if it is inside, else absolute."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def check_name(root: Path | str, name: str) -> Path:
    """The absolute ``root``.

    Raises:
        UserError: for a name that is empty or leads out of it.
    """
    root = Path(root).expanduser().resolve()
    if not name.strip() or not (root / name).resolve().is_relative_to(root) or (root / name).resolve() == root:
        raise UserError(f"run name {name!r} must name a folder inside {root}")
    return root


class RunDirectory:
    """``<root>/<name>/``, made on construction.

    Args:
        root: the folder that holds the runs.
        name: the run's name; where it is taken, ``-2``, ``-3``, ... is added.
        resume: use exactly ``name``, whether it exists or not.

    Attributes:
        secrets: replaced in every file of the run.

    Raises:
        UserError: for a name that is empty or leads out of ``root``.
    """

    def __init__(self, root: Path | str, name: str, *, resume: bool = False) -> None:
        root = check_name(root, name)
        self._new = not (resume and (root / name).exists())
        self.path = root / name if resume else _create_unused(root / name)
        self.path.mkdir(OWNER_ALONE, parents=True, exist_ok=True)
        self.secrets = Secrets()
        self._rewound: set[Path] = set()  # files already cut back to the step at which this run began
        self._ledger_due: list[tuple[int, Mapping[str, Any]]] = []  # not written yet, in step order

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def origins(self) -> Path:
        """Who has set each setting; see ``skyasync.config.load.origins``."""
        return self.path / "origins.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def ledger(self) -> Path:
        """How every prompt ended; see ``skyasync.trainer.checkpoint.ledger.audit``."""
        return self.path / "ledger.jsonl"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.json"

    @property
    def reward_plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def logs(self) -> Path:
        """What the run's processes have printed."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def error(self) -> Path:
        """What ended the run, if an error did: the whole traceback."""
        return self.path / "error.txt"

    def save_error(self, traceback: str) -> None:
        """A full disk costs a warning: the error itself still reaches the user."""
        try:
            self.error.write_text(self.secrets.hide_all(traceback), encoding="utf-8")
        except OSError as problem:
            with suppress(OSError):
                self.error.unlink(missing_ok=True)
            log.warning("%s was not written: %s", shown(self.error), problem)

    def discard(self) -> None:
        """Remove the folder, if it is new: the run has not started."""
        if self._new:
            shutil.rmtree(self.path, ignore_errors=True)

    def save_config(self, yaml: str) -> None:
        """Write the resolved configuration; a resumed run's replaces the first one's."""
        jsonl.replace_text(self.config, yaml)

    def write_samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per record, ``step`` first."""
        hide = self.secrets.hide
        hidden = ({k: hide(v) if isinstance(v, str) else v for k, v in record.items()} for record in records)
        self._append(self.samples, step, hidden)

    def write_ledger(self, step: int, ended: Mapping[str, Any]) -> None:
        """How the prompts of a step ended; what a full disk refuses is written with a later step."""
        self._ledger_due.append((step, ended))
        while self._ledger_due:
            due, how = self._ledger_due[0]
            self._append(self.ledger, due, [how])
            self._ledger_due.pop(0)

    def _append(self, file: Path, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """The first call of a resumed run drops the lines of ``step`` and later ones: those steps are redone."""
        if file not in self._rewound:
            jsonl.keep_rows(file, lambda row: row["step"] < step)
            self._rewound.add(file)
        jsonl.append_rows(file, ({"step": step, **record} for record in records))


def _create_unused(path: Path) -> Path:
    """Create the first of ``path``, ``path-2``, ... that does not exist; safe when two runs start at once."""
    for number in itertools.count(1):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir(OWNER_ALONE, parents=True)
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable")


def lock_run(folder: Path) -> None:
    """Lock the folder until ``unlock_run``; a process may lock its own folder again.

    The lock belongs to the kernel, so it ends with this process, however the process ends. Neither forks nor
    subprocesses inherit it. What stands in the file is only for people.

    Raises:
        UserError: if another process trains there, naming the process.
    """
    if folder in _locked:
        return
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as problem:  # a full disk: reported elsewhere
        log.warning("%s is not guarded against a second command: %s", folder, problem)
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        content = os.read(file, 4096)
        os.close(file)
        if problem.errno in WITHOUT_LOCKS:
            log.warning("%s is not guarded against a second command, its file system has no locks: %s", folder, problem)
            return
        try:
            holder = json.loads(content)
            who = f"process {holder['pid']} on {holder['host']} trains there since {holder['since']}"
        except (ValueError, KeyError, TypeError):  # it has only just locked it
            who = "another process trains there"
        raise UserError(
            f"{folder} is in use: {who}; wait for it, end it, or give this run another trainer.run_name"
        ) from None
    _locked[folder] = file
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)


def unlock_run(folder: Path) -> None:
    """Release the lock, if this process holds it."""
    file = _locked.pop(folder, None)
    if file is not None:
        with suppress(OSError):
            os.ftruncate(file, 0)
        os.close(file)
