"""Whether the folders of a run can be written, found by doing it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from operator import attrgetter
from pathlib import Path

from skyasync.config.resume import STATE, Resume, checkpoints_of
from skyasync.config.schema import Config, TrainerConfig
from skyasync.errors import UserError
from skyasync.trainer.checkpoint.checkpoints import Checkpoints, choose, refuse_other
from skyasync.trainer.checkpoint.settings_check import check_recorded


def check_folders(trainer: TrainerConfig) -> None:
    """Raises ``UserError`` naming the key of a folder that cannot be written."""
    check_writable("trainer.runs_dir", trainer.runs_dir)
    for name in ("ckpt_path", "export_path", "critic.export_path"):
        if folder := attrgetter(name)(trainer):
            check_writable(f"trainer.{name}", folder)


def check_resuming(cfg: Config) -> None:
    """Raises ``UserError`` if a named checkpoint is not there, or damaged at a glance, or of another run."""
    resume, checkpoints = Resume.of(cfg.trainer), Checkpoints(checkpoints_of(cfg.trainer))
    if not resume.wanted:
        return
    if folder := choose(resume, checkpoints, skip=lambda *_: None):  # which is told when it is loaded
        refuse_other(folder, "seed", json.loads((folder / STATE).read_text())["seed"], cfg.trainer.seed)
        check_recorded(folder, cfg)


def check_writable(key: str, folder: str) -> None:
    """Make the folder and a file in it, and take away again what was not there."""
    path = Path(folder).expanduser().absolute()
    made = [place for place in (path, *path.parents) if not place.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"{key}={folder} cannot be written: {error.strerror or error}") from error
    finally:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()
