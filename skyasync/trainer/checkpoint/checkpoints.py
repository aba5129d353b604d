"""Checkpoints that are complete or absent: the best one, and the one from which a run resumes.

Invariant: a folder named ``step_<k>`` was complete, and on the disk, when it got that name: it is
written under another name, its files and folders are synced, and it is renamed last. A damaged
checkpoint is never used, and never left out silently.

    step_<k>/manifest.json   size and checksum of every file
    step_<k>/state.json      step, position in the prompt stream, time of writing
    step_<k>/config.json     the settings
    best.json                the best checkpoint, which is never removed for its age

The time of writing orders checkpoints: the times of files are those of the last copy.
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

    All prompts before ``position`` have been trained, and the prompts in ``trained_early``, which
    overtook others. ``seed``, ``dataset_size`` and ``data`` guard against resuming other data.
    """

    step: int
    position: int
    seed: int
    dataset_size: int
    kl_coef: float = 0.0  # of an adaptive controller
    trained_early: list[int] = field(default_factory=list)
    data: str = ""  # a digest of the prompts' content
    stream: list[int] = field(default_factory=list)  # ``position`` in streamed data


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far: the name of its folder, and its metric."""

    folder: str
    metric: str
    value: float


def read_best(checkpoints: Path) -> Best | None:
    """Read which checkpoint is the best; None if there is none, or its folder is gone."""
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
        self.damaged: set[Path] = set()  # found so far
        self._swept = False

    @contextmanager
    def unfinished(self, step: int) -> Iterator[Unfinished]:
        """Open a new checkpoint to be filled.

        Without ``finish`` nothing of it is left, and older checkpoints are unchanged.
        """
        if not self._swept:
            # A run that was killed may have left such folders.
            for suffix in (_UNFINISHED, _DISCARDED):
                for remnant in list(self.folder.glob(f"step_*{suffix}")):
                    shutil.rmtree(remnant, ignore_errors=True)
            self._swept = True
        # Later than all others, even if the clock was set back.
        now_ns = time.time_ns()
        for folder in self.newest_first():
            now_ns = max(now_ns, 1 + (written_ns(folder) or 0))
        final = self.folder / f"step_{step:06d}"
        path = final.with_name(final.name + _UNFINISHED)
        shutil.rmtree(path, ignore_errors=True)
        # Other users of the machine must not read the weights.
        path.mkdir(0o700, parents=True)
        try:
            yield Unfinished(path, final, now_ns, self)
        finally:
            shutil.rmtree(path, ignore_errors=True)  # no effect if it was renamed

    def latest(self) -> Path | None:
        """The newest checkpoint without damage at a glance; damaged ones are logged."""
        for folder in self.newest_first():
            problem = glance(folder)
            if not problem:
                return folder
            self.skip(folder, problem)
        return None

    def newest_first(self) -> list[Path]:
        """All checkpoints, damaged or not, by the times of writing that they record.

        One without a readable time is ordered by its step.
        """
        times_ns: dict[Path, int] = {}
        folders = []
        for folder in self.folder.glob("step_*"):
            if folder.is_dir() and not folder.suffix:  # finished ones have no suffix
                folders.append(folder)
        # In the order of the steps: names are longer from step 1,000,000 on.
        for folder in sorted(folders, key=lambda folder: (len(folder.name), folder.name)):
            recorded_ns = written_ns(folder)
            if recorded_ns is None:
                recorded_ns = max(times_ns.values(), default=0)
            times_ns[folder] = recorded_ns
        # Reversed, not sorted in reverse: of equal times the larger step comes first.
        return sorted(times_ns, key=times_ns.__getitem__)[::-1]

    def of_step(self, step: int) -> Path:
        """The folder of a step's checkpoint.

        Raises:
            UserError: if there is none, naming the existing ones.
        """
        folder = self.folder / f"step_{step:06d}"
        if folder.is_dir():
            return folder
        names = [path.name.removeprefix("step_") for path in self.newest_first()]
        steps = sorted(int(name) for name in names if name.isdigit())
        existing = "there are none"
        if steps:
            existing = f"there are {', '.join(map(str, steps))}"
        raise UserError(
            f"trainer.resume_mode={step}: {self.folder} has no checkpoint of that step ({existing})"
        )

    def skip(self, folder: Path, problem: str) -> None:
        """Log a damaged checkpoint; it does not count towards ``keep``."""
        log.warning("checkpoint %s is damaged and left out: %s", folder, problem)
        self.damaged.add(folder)

    def mark_best(self, folder: Path, metric: str, value: float) -> None:
        """Make this checkpoint the best; the next one may remove the former best."""
        self.best = Best(folder.name, metric, value)
        replace_text(self.folder / BEST, json.dumps(asdict(self.best)) + "\n")

    def remove_old(self) -> None:
        """Remove all but the newest ``keep`` undamaged checkpoints and the best one."""
        if not self.keep:
            return
        undamaged_folders = [folder for folder in self.newest_first() if folder not in self.damaged]
        for folder in undamaged_folders[self.keep :]:
            if self.best is None or folder.name != self.best.folder:
                shutil.rmtree(_set_aside(folder), ignore_errors=True)


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint under another name.

    Attributes:
        path: the folder to be filled.
        final: the folder that it becomes.
        written_ns: the time that it records.
    """

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
        """Write state and settings, sync all files, and give the folder its final name.

        Old checkpoints are removed.

        Args:
            written: the sums of files that are synced already; others are read.

        Raises:
            OSError: if the folder does not hold these files.
        """
        sums: Sums = dict(written or {})
        final = self.final
        for path in self.path.rglob("*"):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and name not in sums:
                manifest.sync_file(path)
                sums[name] = manifest.sum_of(path)
        missing = next(manifest.misfits(self.path, sums), "")
        if missing:
            raise OSError(f"{self.path} does not hold what was written: {missing}")
        self._write_json(STATE, {**asdict(state), WRITTEN: self.written_ns}, sums)
        if config is not None:
            self._write_json(CONFIG, config, sums)
        manifest.write(self.path, sums)
        former = _set_aside(final) if final.exists() else None
        checkpoints = self.checkpoints
        if checkpoints.best is not None and checkpoints.best.folder == final.name:
            # It was another checkpoint of this step, before the run was resumed.
            checkpoints.best = None
            (checkpoints.folder / BEST).unlink(missing_ok=True)
        os.replace(self.path, final)
        manifest.sync_folder(final.parent)
        if former is not None:  # the new one is safe
            shutil.rmtree(former, ignore_errors=True)
        checkpoints.damaged.discard(final)
        checkpoints.remove_old()
        return final

    def _write_json(self, name: str, content: Mapping[str, Any], sums: Sums) -> None:
        with manifest.summed(self.path / name, sums, name) as file:
            file.write(json.dumps(content, indent=2, default=str).encode())


def glance(folder: Path) -> str:
    """The problem of a checkpoint; "" if there is none.

    Small files are read; of large ones only the sizes are compared.
    """
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
    small_files = {name: entry for name, entry in sums.items() if is_small(name)}
    problem = next(manifest.damage(folder, small_files), "")
    return problem or next(manifest.misfits(folder, sums), "")


def is_small(name: str) -> bool:
    """Whether a file of a checkpoint is read at a glance: the controller's JSON files are."""
    return "/" not in name and name.endswith(".json")


def load_state(folder: Path, *, seed: int, dataset_size: int, data: str = "") -> TrainState:
    """The state in a checkpoint.

    Args:
        data: a digest of the prompts; "" if it is not known.

    Raises:
        UserError: for another seed or dataset: the prompts would be in another order.
    """
    values = json.loads((folder / STATE).read_text(encoding="utf-8"))
    # The file also has the time of writing, and may be of another release.
    state = TrainState(
        **{entry.name: values[entry.name] for entry in fields(TrainState) if entry.name in values}
    )
    check_equal(folder, "seed", state.seed, seed)
    check_equal(folder, "dataset_size", state.dataset_size, dataset_size)
    if state.data and data and state.data != data:
        raise UserError(
            f"checkpoint {folder} was made with other prompts than data.train_data has now (digest {state.data}, this "
            f"run has {data}): its position among them would be wrong; resume with the same data, or set "
            f"trainer.resume_mode=none"
        )
    return state


def check_equal(folder: Path, name: str, saved: int, current: int) -> None:
    """Raise UserError if a checkpoint was made with another seed, or other data."""
    if saved != current:
        raise UserError(
            f"checkpoint {folder} was made with {name}={saved}, this run has {current}: "
            f"resume with the same data and trainer.seed, or set trainer.resume_mode=none"
        )


def choose(
    resume: Resume, checkpoints: Checkpoints, skip: Callable[[Path, str], None] | None = None
) -> Path | None:
    """The checkpoint to resume from, by a glance at it; None if there is none and none is named.

    Args:
        skip: called for a damaged one that is left out; by default ``checkpoints.skip``.

    Raises:
        UserError: if the named checkpoint, or every checkpoint, is damaged.
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
    """The error for a checkpoint that the user has named."""
    return UserError(
        f"checkpoint {folder} cannot be used: {problem}; choose another one, or set trainer.resume_mode=latest for "
        f"the newest that is whole"
    )


def _set_aside(folder: Path) -> Path:
    """Rename a checkpoint: while it is removed it must not look complete."""
    discarded_folder = folder.with_name(folder.name + _DISCARDED)
    shutil.rmtree(discarded_folder, ignore_errors=True)
    os.replace(folder, discarded_folder)
    return discarded_folder
