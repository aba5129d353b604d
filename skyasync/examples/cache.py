"""Folders that are made once and then found again.

Invariant: a folder under its final name is complete. It is made under a temporary name next to its final place and
renamed, so of several processes making it at once the first to finish wins and the others use its result.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """``$SKYASYNC_CACHE``, else ``$XDG_CACHE_HOME/skyasync``, else ``~/.cache/skyasync``."""
    if explicit := os.environ.get("SKYASYNC_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyasync"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``make(temporary folder)`` if it does not exist yet. Raises what ``make`` raises."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(temporary)
        _rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _rename(temporary: Path, folder: Path) -> None:
    temporary.chmod(0o755)  # mkdtemp makes folders that only their owner can enter
    try:
        temporary.rename(folder)
    except OSError:  # a folder with files in it is never replaced: another process was faster
        if not folder.is_dir():
            raise
