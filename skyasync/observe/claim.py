"""One command trains in a run's folder at a time: it holds a lock on the file ``lock`` there.

Invariant: the lock is the kernel's, so it ends with the process that holds it, however that one ended, and what stands
in the file is only for people. It is that process's alone: neither its forks nor what it starts holds it. Who only
reads a run does not ask for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from skyasync.errors import UserError

NAME = "lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # what file systems answer that have none

log = logging.getLogger(__name__)

_held: dict[Path, int] = {}  # by this process, which must open the file only once: closing it anywhere would free it


def claim(folder: Path) -> None:
    """Hold the folder from here to ``release``; a process may claim its own again.

    Raises:
        UserError: if another process trains there, saying which.
    """
    if folder in _held:
        return
    try:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as problem:  # a full disk, which others tell of
        log.warning("%s is not guarded against a second command: %s", folder, problem)
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        said = os.read(file, 4096)
        os.close(file)
        if problem.errno not in WITHOUT_LOCKS:
            raise UserError(_in_use(folder, said)) from None
        log.warning("%s is not guarded against a second command, its file system has no locks: %s", folder, problem)
        return
    _held[folder] = file
    with contextlib.suppress(OSError):
        _write(file, {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})


def release(folder: Path) -> None:
    """Others may train there; nothing where it is not held."""
    file = _held.pop(folder, None)
    if file is not None:
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
        os.close(file)


def _write(file: int, holder: dict[str, object]) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(holder).encode(), 0)


def _in_use(folder: Path, said: bytes) -> str:
    try:
        holder = json.loads(said)
        who = f"process {holder['pid']} on {holder['host']} trains there since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # it has begun this very moment
        who = "another process trains there"
    return f"{folder} is in use: {who}; wait for it, end it, or give this run another trainer.run_name"
