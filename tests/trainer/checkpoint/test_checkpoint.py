"""Checkpoints are complete or absent."""

import os
import shutil

import pytest

from skyasync.errors import UserError
from skyasync.simulate.clock import run_virtual
from skyasync.trainer.checkpoint.checkpoints import Checkpoints, TrainState, load_state
from tests.trainer.checkpoint.example_checkpoint import saved
from tests.virtual_time import virtual_time


def state(step=1, **changed):
    return TrainState(
        **{"step": step, "position": 4 * step, "seed": 42, "dataset_size": 10, **changed}
    )


async def write(folder):
    (folder / "weights").write_text("new")


def save(checkpoints, step, writer=write):
    return run_virtual(saved(checkpoints, state(step), writer))


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_what_was_saved_is_loaded(tmp_path):
    before = state(3, kl_coef=0.5)
    folder = run_virtual(saved(Checkpoints(tmp_path), before, write))
    assert load_state(folder, seed=42, dataset_size=10) == before
    assert names(folder) == ["manifest.json", "state.json", "weights"]


def test_a_crash_while_writing_leaves_no_checkpoint_and_the_last_one_is_still_the_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    async def crashes(folder):
        await write(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(checkpoints, 2, crashes)
    assert not (tmp_path / "step_000002").exists()
    assert checkpoints.latest().name == "step_000001"
    assert save(checkpoints, 2).name == checkpoints.latest().name == "step_000002"
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_the_name_comes_last(tmp_path):
    async def looks(folder):
        assert names(tmp_path) == [folder.name]
        assert Checkpoints(tmp_path).latest() is None

    save(Checkpoints(tmp_path), 1, looks)
    assert Checkpoints(tmp_path).latest().name == "step_000001"


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_the_newest_are_kept(tmp_path, keep):
    checkpoints = Checkpoints(tmp_path, keep)
    for step in range(1, 5):
        save(checkpoints, step)
    assert names(tmp_path) == [f"step_{s:06d}" for s in range(1, 5)][-keep:]


def test_a_folder_that_is_half_removed_is_no_checkpoint(tmp_path, monkeypatch):
    """A crash while an old checkpoint is removed."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    really = shutil.rmtree

    def crash(folder, **options):
        if "000001" in str(folder) and os.path.isdir(folder):
            os.unlink(folder / "weights")
            raise KeyboardInterrupt
        really(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 2)
    assert all((p / "weights").is_file() for p in tmp_path.glob("step_*") if not p.suffix)
    assert checkpoints.latest().name == "step_000002"


def test_saving_a_step_again_replaces_it_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (save(checkpoints, 1) / "old").touch()
    save(checkpoints, 1)
    assert names(tmp_path / "step_000001") == ["manifest.json", "state.json", "weights"]
    assert names(tmp_path) == ["step_000001"]


def test_the_latest_is_the_one_written_last_whatever_its_number(tmp_path):
    """A folder may have checkpoints of an earlier, longer run."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number, step in enumerate((90, 100, 1_000_000, 5)):
        folder = save(checkpoints, step)
        os.utime(folder / "state.json", (number, number))
    assert checkpoints.latest().name == "step_000005"
    assert names(tmp_path) == ["step_000005", "step_1000000"]


@pytest.mark.parametrize("steps", [(3, 6, 9), (6, 9, 3, 4)])
def test_a_copy_that_sets_new_times_has_the_same_order(tmp_path, steps):
    """The second case: a run that resumed from step 3."""
    checkpoints = Checkpoints(tmp_path)
    for step in steps:
        save(checkpoints, step)
    for number, step in enumerate(sorted(steps, reverse=True)):
        for path in tmp_path.glob(f"step_{step:06d}/**/*"):
            os.utime(path, (number, number))
    assert [int(p.name[5:]) for p in Checkpoints(tmp_path).newest_first()] == [*reversed(steps)]


def test_the_order_is_that_of_writing_though_the_clock_goes_back(tmp_path, monkeypatch):
    for step, now in ((9, 1000), (3, 10), (4, 500)):
        monkeypatch.setattr("time.time_ns", lambda now=now: now)
        save(Checkpoints(tmp_path), step)
    assert [p.name for p in Checkpoints(tmp_path).newest_first()] == [
        "step_000004",
        "step_000003",
        "step_000009",
    ]


def test_a_state_that_cannot_be_read_keeps_its_place_by_the_step(tmp_path):
    for step in (1, 2, 3):
        save(Checkpoints(tmp_path), step)
    (tmp_path / "step_000002" / "state.json").write_text("{")
    assert [p.name for p in Checkpoints(tmp_path).newest_first()] == [
        "step_000003",
        "step_000002",
        "step_000001",
    ]
    save(Checkpoints(tmp_path, keep=2), 4)


def test_there_is_no_latest_without_a_complete_one(tmp_path):
    assert Checkpoints(tmp_path / "none").latest() is None
    (tmp_path / "step_000009").mkdir()
    assert Checkpoints(tmp_path).latest() is None


@pytest.mark.parametrize(("key", "there", "here"), [("seed", 42, 43), ("dataset_size", 10, 11)])
def test_other_prompts_than_the_checkpoints_are_refused(tmp_path, key, there, here):
    folder = save(Checkpoints(tmp_path), 1)
    with pytest.raises(
        UserError, match=rf"was made with {key}={there}, this run has {here}: .*resume_mode=none"
    ):
        load_state(folder, **{"seed": 42, "dataset_size": 10, key: here})


@virtual_time
async def test_cancellation_while_writing_leaves_no_checkpoint(tmp_path):
    import asyncio

    async def slow(folder):
        await asyncio.sleep(100)

    task = asyncio.create_task(saved(Checkpoints(tmp_path), state(1), slow))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait([task])
    assert Checkpoints(tmp_path).latest() is None
