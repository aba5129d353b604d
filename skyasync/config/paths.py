"""Paths and names in settings, resolved once, in the program: a cluster's processes work in another folder."""

from __future__ import annotations

from pathlib import Path

from skyasync.config.resume import Resume, checkpoints_of, saves
from skyasync.config.schema import TrainerConfig
from skyasync.errors import UserError
from skyasync.registry import resolve_reference


def model_path(path: str, key: str = "trainer.policy.model.path") -> str:
    """A local folder's absolute path, a hub name as it is, or what ``module:function`` makes.

    Raises:
        UserError: if no model is named, or a local path has none.
    """
    if not path:
        raise UserError(f"{key} is empty: name a Hugging Face model, a local folder, or module:function")
    if ":" in path and not Path(path).exists():
        return str(resolve_reference(path, kind=key)())
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{key}={path!r} is a folder without config.json")
        return str(folder.resolve())
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise UserError(f"{key}={path!r} is neither a local folder nor a Hugging Face name (owner/name)")
    return path


def refuse_foreign_checkpoints(trainer: TrainerConfig) -> None:
    """Raises UserError if a run that starts anew would save into a folder that holds checkpoints."""
    fresh = not Resume.of(trainer).within(checkpoints_of(trainer))
    if fresh and saves(trainer) and trainer.ckpt_path and any(Path(trainer.ckpt_path).glob("step_*")):
        raise UserError(
            f"trainer.ckpt_path={trainer.ckpt_path} holds another run's checkpoints, which this one would replace: "
            f"set trainer.resume_mode=latest to go on with them, or choose another folder"
        )
