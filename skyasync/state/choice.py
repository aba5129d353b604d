"""Which checkpoint a run goes on from.

Invariant: a damaged checkpoint is never used, and never left out silently: one that the user has named is refused, the
newest gives way to the one before, and where none is whole the run does not start anew by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from skyasync.config.resume import Resume, written_ns
from skyasync.errors import UserError
from skyasync.state.checkpoint import Checkpoints, glance

log = logging.getLogger(__name__)


def choose(resume: Resume, checkpoints: Checkpoints, skip: Callable[[Path, str], None] | None = None) -> Path | None:
    """The checkpoint to go on from, as far as a glance shows; None if there is none and none is named.

    Args:
        skip: told of a damaged one that is left out; by default ``checkpoints.skip``.

    Raises:
        UserError: if the one that is named, or every one, is damaged.
    """
    if resume.named:
        folder = resume.folder or checkpoints.of_step(resume.step or 0)
        if problem := glance(folder):
            raise refusal(folder, problem)
        return folder
    found = checkpoints.newest_first()
    if skip is None and len(found) > 1 and written_ns(found[0]) == 0:
        log.warning(
            "the checkpoints in %s are of an earlier version and do not say when they were written: the newest is "
            "taken to be the one of the largest step, %s (trainer.resume_mode=STEP takes another)",
            checkpoints.folder, found[0].name,
        )  # fmt: skip
    for folder in found:
        if folder in checkpoints.damaged:
            continue
        if not (problem := glance(folder)):
            return folder
        (skip or checkpoints.skip)(folder, problem)
    if found:
        raise UserError(
            f"trainer.resume_mode=latest: all checkpoints in {checkpoints.folder} are damaged ({len(found)} found): "
            f"delete them, or set trainer.resume_mode=none, to start from scratch"
        )
    return None


def refusal(folder: Path, problem: str) -> UserError:
    """For a checkpoint that the user has named."""
    return UserError(
        f"checkpoint {folder} cannot be used: {problem}; choose another one, or set trainer.resume_mode=latest for "
        f"the newest that is whole"
    )
