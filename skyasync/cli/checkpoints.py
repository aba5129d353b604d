"""Which checkpoint, and which settings, a name on the command line means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyasync.config.resume import STATE
from skyasync.errors import UserError
from skyasync.trainer.checkpoint.checkpoints import CONFIG, Checkpoints, glance, read_best

BEST = "best"


def find(name: str, *, best: bool = False) -> Path:
    """A checkpoint's folder: the one that is named, or of a run's folder the newest that is whole, or the best.

    Raises:
        UserError: if there is none, or it is damaged.
    """
    folder = Path(name).expanduser()
    if (folder / STATE).is_file():
        if problem := glance(folder):
            raise UserError(f"checkpoint {folder} cannot be used: {problem}")
        return folder
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name a checkpoint's, or a run's that has some")
    inside = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if best:
        found = read_best(inside)
        if found is None:
            raise UserError(f"{folder} has no best checkpoint: a run with trainer.ckpt_best_metric keeps one")
        return find(str(inside / found.folder))
    newest = Checkpoints(inside).latest()
    if newest is None:
        raise UserError(f"{folder} has no checkpoint: a run with trainer.ckpt_interval keeps some")
    return newest


def settings_of(checkpoint: Path) -> dict[str, Any]:
    """The settings that it was made with; empty where it does not say."""
    try:
        recorded = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
        return dict(recorded["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def is_checkpoint_or_run(name: str) -> bool:
    folder = Path(name).expanduser()
    return (folder / STATE).is_file() or (folder / "checkpoints").is_dir()
