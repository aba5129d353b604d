"""Checkpoints that are whole or absent.

Invariant: a folder named ``step_<k>`` is complete: it is written under another name and renamed last.
``state.json`` in it holds the step, the policy version and the position in the prompt stream.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from skyasync.errors import UserError

_UNFINISHED, _DISCARDED = ".unfinished", ".discarded"


@dataclass(frozen=True)
class TrainState:
    """What a run needs to go on, besides the workers' own state.

    All prompts before ``position`` have been trained, and those in ``ahead``, which overtook others;
    ``seed`` and ``dataset_size`` guard against resuming other data.
    """

    step: int
    position: int
    seed: int
    dataset_size: int
    kl_coef: float = 0.0  # of an adaptive controller
    ahead: list[int] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder, self._keep = folder, keep

    async def save(self, state: TrainState, write: Callable[[Path], Awaitable[None]]) -> Path:
        """Write a checkpoint; ``write(folder)`` adds the workers' state."""
        final = self.folder / f"step_{state.step:06d}"
        unfinished = final.with_name(final.name + _UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        await write(unfinished)
        (unfinished / "state.json").write_text(json.dumps(asdict(state), indent=2))
        _replace(unfinished, final)
        self._prune()
        return final

    def latest(self) -> Path | None:
        """The complete checkpoint that was written last."""
        found = self._complete()
        return found[-1] if found else None

    def _complete(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = (p for p in self.folder.glob("step_*") if (p / "state.json").is_file() and not p.suffix)
        return sorted(found, key=lambda p: ((p / "state.json").stat().st_mtime_ns, p.name))

    def _prune(self) -> None:
        if self._keep:
            for old in self._complete()[: -self._keep]:
                _discard(old)


def load_state(folder: Path, *, seed: int, dataset_size: int) -> TrainState:
    """The state in a checkpoint.

    Raises:
        UserError: if it belongs to another seed or dataset: the prompts would not be the right ones.
    """
    state = TrainState(**json.loads((folder / "state.json").read_text()))
    for name, here in (("seed", seed), ("dataset_size", dataset_size)):
        refuse_other(folder, name, getattr(state, name), here)
    return state


def refuse_other(folder: Path, name: str, made_with: int, here: int) -> None:
    """Raises UserError if a checkpoint was made with another seed, or other data."""
    if made_with != here:
        raise UserError(
            f"checkpoint {folder} was made with {name}={made_with}, this run has {here}: "
            f"resume with the same data and trainer.seed, or set trainer.resume_mode=none"
        )


def _replace(unfinished: Path, final: Path) -> None:
    if final.exists():
        _discard(final)
    os.replace(unfinished, final)


def _discard(folder: Path) -> None:
    """Take the name away first: a folder half removed is no checkpoint any more."""
    discarded = folder.with_name(folder.name + _DISCARDED)
    shutil.rmtree(discarded, ignore_errors=True)
    os.replace(folder, discarded)
    shutil.rmtree(discarded, ignore_errors=True)
