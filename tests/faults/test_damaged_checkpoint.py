"""The newest checkpoint is truncated, then has a bit flipped: the run names it, and resumes from the one before."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end import leftovers
from tests.end_to_end.runs import Train, Trained
from tests.faults.restarted_command import check, check_same_as_undisturbed, settings_of_plan
from tests.faults.warnings_file import WarningsToFile

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.usefixtures("no_temporary_files")]


@pytest.mark.parametrize("plan", ["sync", "one_step_off", "streamed", "fully_async"])
def test_a_run_goes_on_from_before_a_damaged_checkpoint_and_says_so(
    plan: str, train: Train, tmp_path: Path
) -> None:
    settings = [*settings_of_plan(plan), "trainer.ckpt_keep=3"]

    def resumed(until: int, damaged: Path | None = None, words: str = "") -> Trained:
        warnings = tmp_path / f"heard-{until}"
        limit = f"trainer.max_training_steps={until}"
        run = train(*settings, limit, experiment=partial(WarningsToFile, file=warnings))  # type: ignore[arg-type]
        written = warnings.read_text()
        named = [line for line in written.splitlines() if "is damaged and left out" in line]
        if damaged is None:
            assert not named
        else:
            before = int(damaged.name.removeprefix("step_")) - 1
            assert len(named) == 1 and damaged.name in named[0] and words in named[0]
            assert f"step_{before:06d}, after step {before}\n" in written
        return run

    checkpoints = resumed(5).folder / "checkpoints"
    shorten(largest(newest := checkpoints / "step_000005"))
    resumed(8, newest, " bytes instead of ")
    shutil.rmtree(
        checkpoints / "step_000008"
    )  # no prompts are in flight: it was to be the last step
    newest = checkpoints / "step_000007"
    flip(largest(newest) if plan in ("sync", "streamed") else newest / "rollouts.safetensors")
    run = resumed(12, newest, "does not match its checksum")
    check(run, 12)
    if plan != "fully_async":
        check_same_as_undisturbed(run, [*settings, "trainer.max_training_steps=12"], train)
    assert leftovers.none_soon(leftovers.of_the_cluster) == []


def largest(folder: Path) -> Path:
    return max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
