"""Whether the folders of a run can be written, found by doing it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

from skyasync.config.schema import TrainerConfig
from skyasync.errors import UserError
from skyasync.state.checkpoint import Checkpoints, refuse_other


def check_folders(trainer: TrainerConfig) -> None:
    """Raises ``UserError`` naming the key of a folder that cannot be written, or of a checkpoint of another run."""
    check_writable("trainer.runs_dir", trainer.runs_dir)
    for name in ("ckpt_path", "export_path"):
        if getattr(trainer, name):
            check_writable(f"trainer.{name}", getattr(trainer, name))
    if trainer.resume_mode == "latest":
        folder = Path(trainer.ckpt_path or Path(trainer.runs_dir).expanduser() / trainer.run_name / "checkpoints")
        if found := Checkpoints(folder).latest():
            refuse_other(found, "seed", json.loads((found / "state.json").read_text())["seed"], trainer.seed)


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
