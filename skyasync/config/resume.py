"""What a run resumes from, ``trainer.resume_mode``: nothing, the newest checkpoint, one of a step,
or one folder.

Invariant: whether a run shares the folder of the run that it resumes is decided here alone: it does
unless it loads a checkpoint of another folder. By default a run resumes if the user has named it
and it has checkpoints: the same command continues it, whatever ended it before.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyasync.errors import UserError

if TYPE_CHECKING:
    from skyasync.config.schema import TrainerConfig

STATE = "state.json"  # of a checkpoint
WRITTEN = "written_ns"  # in it: the time, later than that of every checkpoint next to it


@dataclass(frozen=True)
class Resume:
    """``step`` and ``folder`` are what the user has named; without them it is the newest, if
    ``requested``."""

    requested: bool
    step: int | None = None
    folder: Path | None = None

    @classmethod
    def of(cls, trainer: TrainerConfig) -> Resume:
        mode = trainer.resume_mode
        if mode == "auto":
            if trainer.run_name and _has_checkpoints(trainer):
                mode = "latest"
            else:
                mode = "none"
        if mode in ("none", "latest"):
            return cls(requested=mode == "latest")
        if mode.isdecimal() and len(mode) < 18:
            return cls(requested=True, step=int(mode))
        return cls(requested=True, folder=Path(mode).expanduser().resolve())

    @property
    def named(self) -> bool:
        """The user has named one checkpoint: no other will do."""
        return self.step is not None or self.folder is not None

    def within(self, checkpoints: Path) -> bool:
        """Whether it continues the run with these checkpoints."""
        return self.requested and (
            self.folder is None or self.folder.parent == checkpoints.resolve()
        )


def keeps_checkpoints(trainer: TrainerConfig) -> bool:
    """Whether a run saves now and then, and at its end."""
    return bool(trainer.ckpt_interval or trainer.ckpt_minutes or trainer.ckpt_best_metric)


def saves(trainer: TrainerConfig) -> bool:
    """Whether a run may write checkpoints at all."""
    return keeps_checkpoints(trainer) or trainer.ckpt_on_exit


def settle_run_name(trainer: TrainerConfig) -> str:
    """Set ``run_name`` to the newest attempt, and return a line for the user if there are other
    folders than that.

    A run that ended before its first checkpoint is started again as ``<run_name>-2``, and so on.
    The same command continues the newest of them, unless the folder ``<run_name>`` is gone: then
    the name is free for a new run.
    """
    if (
        trainer.resume_mode != "auto"
        or not trainer.run_name
        or trainer.ckpt_path
        or _has_checkpoints(trainer)
    ):
        return ""
    root = Path(trainer.runs_dir).expanduser() / trainer.run_name
    checkpoints = root.parent.glob(f"{glob.escape(root.name)}-*/checkpoints/step_*")
    attempts = [
        path
        for path in checkpoints
        if not path.suffix and path.parts[-3].removeprefix(f"{root.name}-").isdecimal()
    ]
    if not attempts:
        return ""
    newest = max(
        attempts, key=lambda path: (written_ns(path) or 0, int(path.parts[-3].rpartition("-")[2]))
    )
    name = trainer.run_name
    attempt = str(Path(name).with_name(newest.parts[-3]))
    if not root.exists():
        return f"a new run {name}, since it has no folder; trainer.run_name={attempt} continues {attempt}"
    trainer.run_name = attempt
    return f"the run {name} ended before its first checkpoint, and {attempt} is its newest attempt"


def written_ns(folder: Path) -> int | None:
    """When a checkpoint was written: None if it cannot be read."""
    try:
        return int(json.loads((folder / STATE).read_text(encoding="utf-8"))[WRITTEN])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def settle_resume_mode(trainer: TrainerConfig) -> str:
    """Settle ``auto`` before this run adds a checkpoint. Returns a line if the run continues
    another one."""
    if trainer.resume_mode != "auto":
        return ""
    if Resume.of(trainer).requested:
        trainer.resume_mode = "latest"
    else:
        trainer.resume_mode = "none"
    if trainer.resume_mode == "none":
        return ""
    return (
        f"going on with the run {trainer.run_name}, which has checkpoints; a new one has another trainer.run_name, or "
        f"trainer.resume_mode=none"
    )


def checkpoints_of(trainer: TrainerConfig) -> Path:
    """The folder of the checkpoints of the run ``trainer.run_name``."""
    return (
        Path(trainer.ckpt_path or Path(trainer.runs_dir) / trainer.run_name / "checkpoints")
        .expanduser()
        .resolve()
    )


def _has_checkpoints(trainer: TrainerConfig) -> bool:
    try:
        return any(checkpoints_of(trainer).glob("step_*"))
    except (OSError, ValueError):  # no folder can have that name, which check_name says
        return False


def check_resume(trainer: TrainerConfig) -> Iterator[str]:
    """A problem if the run would resume from a folder that cannot exist."""
    resume = Resume.of(trainer)
    if resume.requested and not resume.folder and not trainer.run_name and not trainer.ckpt_path:
        yield (
            f"trainer.resume_mode={trainer.resume_mode} finds nothing in a run folder whose name is made again "
            f"at every start: set trainer.run_name to the run to resume, or trainer.ckpt_path to the folder of its "
            f"checkpoints"
        )


def refuse_foreign_checkpoints(trainer: TrainerConfig) -> None:
    """Raises UserError if a run that starts again would save into a folder that holds
    checkpoints."""
    fresh = not Resume.of(trainer).within(checkpoints_of(trainer))
    if (
        fresh
        and saves(trainer)
        and trainer.ckpt_path
        and any(Path(trainer.ckpt_path).glob("step_*"))
    ):
        raise UserError(
            f"trainer.ckpt_path={trainer.ckpt_path} has another run's checkpoints, which this one would replace: "
            f"set trainer.resume_mode=latest to resume them, or choose another folder"
        )
