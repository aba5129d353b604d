"""Folders that are made once and then found again.

Invariant: a folder under its final name is complete. It is made under a temporary name, and renamed at the end. If
several processes make it at once, all use the result of the first to finish.
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
        temporary.chmod(0o755)  # mkdtemp makes folders that only their owner can enter
        temporary.rename(folder)
    except OSError:  # a folder with files in it is never replaced: another process was faster
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
