"""Checkpoints that are whole or absent, which one is the best, and which one a run resumes from.

Invariant: a folder named ``step_<k>`` was complete, and on the disk, when it got that name: it is
written under another, its files and folders are synced, and it is renamed last. ``manifest.json``
in it says what every file must hold; ``state.json`` the step, the position in the prompt stream,
and when the checkpoint was written. That time orders checkpoints: the times of files are those of
the last copy. ``config.json`` holds the settings. ``best.json``, next to the folders, names the
best one, which is never removed for being old. A damaged checkpoint is never used, and never left
out silently.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from skyasync.config.resume import STATE, WRITTEN, Resume, written_ns
from skyasync.errors import UserError
from skyasync.observability.jsonl import replace_text
from skyasync.utils import manifest
from skyasync.utils.manifest import FileSum, Sums

log = logging.getLogger(__name__)

CONFIG = "config.json"
BEST = "best.json"
_UNFINISHED = ".unfinished"
_DISCARDED = ".discarded"


@dataclass(frozen=True)
class TrainState:
    """The state of a run without that of the workers.

    All prompts before ``position`` have been trained, and those in ``trained_early``, which
    overtook others; ``seed``, ``dataset_size`` and ``data`` guard against resuming other data.
    """

    step: int
    position: int
    seed: int
    dataset_size: int
    kl_coef: float = 0.0  # of an adaptive controller
    trained_early: list[int] = field(default_factory=list)
    data: str = ""  # a digest of what the prompts say
    stream: list[int] = field(default_factory=list)  # where ``position`` is in streamed data


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far: the name of its folder, and the metric that it has."""

    folder: str
    metric: str
    value: float


def read_best(checkpoints: Path) -> Best | None:
    """None if there is none, or its folder is gone."""
    try:
        values = json.loads((checkpoints / BEST).read_text(encoding="utf-8"))
        best = Best(str(values["folder"]), str(values["metric"]), float(values["value"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if (checkpoints / best.folder).is_dir():
        return best
    return None


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder = folder
        self.keep = keep
        self.best = read_best(folder)
        self.damaged: set[Path] = set()  # as far as is known
        self._swept = False

    @contextmanager
    def unfinished(self, step: int) -> Iterator[Unfinished]:
        """A new checkpoint to be filled. Without ``finish`` nothing of it is left, and older ones
        are as they were."""
        if not self._swept:  # what a run that was killed has left
            for left in [
                *self.folder.glob(f"step_*{_UNFINISHED}"),
                *self.folder.glob(f"step_*{_DISCARDED}"),
            ]:
                shutil.rmtree(left, ignore_errors=True)
            self._swept = True
        now_ns = max(
            [time.time_ns(), *(1 + (written_ns(folder) or 0) for folder in self.newest_first())]
        )
        final = self.folder / f"step_{step:06d}"
        path = final.with_name(final.name + _UNFINISHED)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(0o700, parents=True)
        try:
            yield Unfinished(path, final, now_ns, self)
        finally:
            shutil.rmtree(path, ignore_errors=True)  # unless it was renamed

    def latest(self) -> Path | None:
        """The checkpoint that was written last and shows no damage at a glance; others are
        logged."""
        for folder in self.newest_first():
            problem = glance(folder)
            if not problem:
                return folder
            self.skip(folder, problem)
        return None

    def newest_first(self) -> list[Path]:
        """All that were complete once, damaged or not, in the order of what they record.

        One that cannot be read has the place that its step has.
        """
        when: dict[Path, int] = {}
        folders = (p for p in self.folder.glob("step_*") if p.is_dir() and not p.suffix)
        for folder in sorted(folders, key=lambda p: (len(p.name), p.name)):
            known = written_ns(folder)
            if known is None:
                when[folder] = max(when.values(), default=0)
            else:
                when[folder] = known
        return sorted(when, key=when.__getitem__)[::-1]

    def of_step(self, step: int) -> Path:
        """The folder of a step's checkpoint.

        Raises:
            UserError: if there is none, naming those there are.
        """
        if (folder := self.folder / f"step_{step:06d}").is_dir():
            return folder
        steps = sorted(
            int(name)
            for p in self.newest_first()
            if (name := p.name.removeprefix("step_")).isdigit()
        )
        if steps:
            there = f"there are {', '.join(map(str, steps))}"
        else:
            there = "there are none"
        raise UserError(
            f"trainer.resume_mode={step}: {self.folder} has no checkpoint of that step ({there})"
        )

    def skip(self, folder: Path, problem: str) -> None:
        """A checkpoint is damaged: this is logged, and it is not counted among those to keep."""
        log.warning("checkpoint %s is damaged and left out: %s", folder, problem)
        self.damaged.add(folder)

    def is_best(self, folder: Path, metric: str, value: float) -> None:
        """This checkpoint is the best one from here on; the one that was may go when the next is
        written."""
        self.best = Best(folder.name, metric, value)
        replace_text(self.folder / BEST, json.dumps(asdict(self.best)) + "\n")


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint under another name; ``path`` is the folder to be filled, ``final`` the one that
    it becomes."""

    path: Path
    final: Path
    written_ns: int
    checkpoints: Checkpoints

    def finish(
        self,
        state: TrainState,
        written: Mapping[str, FileSum] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        """Add the controller's files, make sure that all is on the disk, and give it its name; old
        ones are removed.

        Args:
            written: of files that are synced already; the others are read.
        """
        sums: Sums = dict(written or {})
        for path in (path for path in self.path.rglob("*") if path.is_file()):
            name = path.relative_to(self.path).as_posix()
            if name not in sums:
                manifest.sync_file(path)
                sums[name] = manifest.sum_of(path)
        missing = list(manifest.misfits(self.path, sums))
        if missing:
            raise OSError(f"{self.path} does not hold what was written: {missing[0]}")
        values = {**asdict(state), WRITTEN: self.written_ns}
        texts = {STATE: values, CONFIG: config}
        for name, content in texts.items():
            if content is not None:
                with manifest.summed(self.path / name, sums, name) as file:
                    file.write(json.dumps(content, indent=2, default=str).encode())
        manifest.write(self.path, sums)
        former = _set_aside(self.final) if self.final.exists() else None
        checkpoints = self.checkpoints
        if checkpoints.best is not None and checkpoints.best.folder == self.final.name:
            checkpoints.best = None  # it was another one of this step, before a resume
            (checkpoints.folder / BEST).unlink(missing_ok=True)
        os.replace(self.path, self.final)
        manifest.sync_folder(self.final.parent)
        if former is not None:  # the new one is safe
            shutil.rmtree(former, ignore_errors=True)
        checkpoints.damaged.discard(self.final)
        if checkpoints.keep:
            undamaged = [
                old for old in checkpoints.newest_first() if old not in checkpoints.damaged
            ]
            for old in undamaged[checkpoints.keep :]:
                if checkpoints.best is None or old.name != checkpoints.best.folder:
                    shutil.rmtree(
                        _set_aside(old), ignore_errors=True
                    )  # half removed it must not have that name
        return self.final


def glance(folder: Path) -> str:
    """The problem of a checkpoint, "" if there is none; of its large files only the sizes are
    compared."""
    try:
        if not isinstance(json.loads((folder / STATE).read_text(encoding="utf-8")), dict):
            return f"{STATE} cannot be read: it is not a JSON object"
    except FileNotFoundError:
        if folder.is_dir():
            return f"{STATE} is missing"
        return "there is no such folder"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        return f"{STATE} cannot be read: {reason or 'it is not a JSON object'}"
    try:
        sums = manifest.read(folder)
    except FileNotFoundError:
        return f"{manifest.NAME} is missing"
    except (OSError, ValueError) as error:
        return f"{manifest.NAME} cannot be read: {error}"
    unlisted = manifest.unlisted(folder, sums)
    if unlisted:
        return f"{manifest.NAME} does not list {unlisted[0]}"
    small = {
        name: entry for name, entry in sums.items() if "/" not in name and name.endswith(".json")
    }
    return next(manifest.damage(folder, small), "") or next(manifest.misfits(folder, sums), "")


def load_state(folder: Path, *, seed: int, dataset_size: int, data: str = "") -> TrainState:
    """The state in a checkpoint.

    Args:
        data: a digest of the prompts; compared where both know it.

    Raises:
        UserError: if it belongs to another seed or dataset: the prompts would not be the right
            ones.
    """
    values = json.loads((folder / STATE).read_text(encoding="utf-8"))
    known = {entry.name for entry in fields(TrainState)}
    state = TrainState(**{name: value for name, value in values.items() if name in known})
    refuse_other(folder, "seed", state.seed, seed)
    refuse_other(folder, "dataset_size", state.dataset_size, dataset_size)
    if state.data and data and state.data != data:
        raise UserError(
            f"checkpoint {folder} was made with other prompts than data.train_data has now (digest {state.data}, this "
            f"run has {data}): its position among them would be wrong; resume with the same data, or set "
            f"trainer.resume_mode=none"
        )
    return state


def refuse_other(folder: Path, name: str, made_with: int, here: int) -> None:
    """Raises UserError if a checkpoint was made with another seed, or other data."""
    if made_with != here:
        raise UserError(
            f"checkpoint {folder} was made with {name}={made_with}, this run has {here}: "
            f"resume with the same data and trainer.seed, or set trainer.resume_mode=none"
        )


def choose(
    resume: Resume, checkpoints: Checkpoints, skip: Callable[[Path, str], None] | None = None
) -> Path | None:
    """The checkpoint to resume from, as far as a glance shows; None if there is none and none is
    named.

    Args:
        skip: called for a damaged one that is left out; by default ``checkpoints.skip``.

    Raises:
        UserError: if the one that is named, or every one, is damaged.
    """
    if resume.named:
        folder = resume.folder or checkpoints.of_step(resume.step or 0)
        problem = glance(folder)
        if problem:
            raise refusal(folder, problem)
        return folder
    folders = checkpoints.newest_first()
    for folder in folders:
        if folder in checkpoints.damaged:
            continue
        problem = glance(folder)
        if not problem:
            return folder
        (skip or checkpoints.skip)(folder, problem)
    if folders:
        raise UserError(
            f"trainer.resume_mode=latest: all checkpoints in {checkpoints.folder} are damaged ({len(folders)} found): "
            f"delete them, or set trainer.resume_mode=none, to start from scratch"
        )
    return None


def refusal(folder: Path, problem: str) -> UserError:
    """For a checkpoint that the user has named."""
    return UserError(
        f"checkpoint {folder} cannot be used: {problem}; choose another one, or set trainer.resume_mode=latest for "
        f"the newest that is whole"
    )


def _set_aside(folder: Path) -> Path:
    aside = folder.with_name(folder.name + _DISCARDED)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    return aside
