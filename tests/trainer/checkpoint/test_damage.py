"""A damaged checkpoint is named and skipped; files on the disk are those that were written."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyasync.errors import UserError
from skyasync.simulate.clock import run_virtual
from skyasync.trainer.checkpoint.checkpoints import Checkpoints, TrainState, glance
from skyasync.utils import manifest
from tests.trainer.checkpoint.example_checkpoint import saved

WEIGHTS = "policy/shard-00001.safetensors"


async def write(folder: Path) -> manifest.Sums:
    (folder / "policy").mkdir()
    sums: manifest.Sums = {}
    with manifest.summed(folder / WEIGHTS, sums, WEIGHTS) as file:
        file.write(bytes(range(256)) * 100)
    return sums


def save(checkpoints: Checkpoints, step: int) -> Path:
    state = TrainState(step=step, position=4 * step, seed=42, dataset_size=10)
    return run_virtual(saved(checkpoints, state, write, {"trainer": {"seed": 42}}))


def flip(path: Path, place: int = 1000) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def exchange(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def drop(folder: Path, name: str) -> None:
    """Remove an entry from the manifest, and its file."""
    entries = json.loads((folder / "manifest.json").read_text())
    del entries[name]
    (folder / "manifest.json").write_text(json.dumps(entries))
    (folder / name).unlink()


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


GLANCES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated weights": (lambda f: shorten(f / WEIGHTS), "12800 bytes instead of 25600"),
    "missing weights": (lambda f: (f / WEIGHTS).unlink(), "is missing"),
    "no policy folder": (lambda f: shutil.rmtree(f / "policy"), "is missing"),
    "no state": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "empty state": (lambda f: (f / "state.json").write_text(""), "state.json cannot be read"),
    "zeroed state": (lambda f: zero(f / "state.json"), "state.json cannot be read"),
    "another position": (
        lambda f: exchange(f / "state.json", '"position": 8', '"position": 9'),
        "state.json does not match its checksum",
    ),
    "another setting": (lambda f: flip(f / "config.json", 12), "config.json does not match its checksum"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json cannot be understood"),
    "unlisted file": (lambda f: (f / "policy" / "more").touch(), "manifest.json does not list policy/more"),
    "manifest with an entry removed": (
        lambda f: drop(f, "config.json"),
        "manifest.json does not match its checksum",
    ),
    "another sum in the manifest": (
        lambda f: exchange(f / "manifest.json", '"size": 25600', '"size": 25601'),
        "manifest.json does not match its checksum",
    ),
    "truncated manifest": (lambda f: shorten(f / "manifest.json"), "manifest.json cannot be understood"),
}  # fmt: skip


@pytest.mark.parametrize("kind", GLANCES)
def test_what_a_glance_shows_is_named_in_one_line_and_the_one_before_is_the_latest(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    first, second = save(checkpoints, 1), save(checkpoints, 2)
    harm, words = GLANCES[kind]
    harm(second)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest() == first
    (record,) = caplog.records
    line = record.getMessage()
    assert str(second) in line and words in line and "\n" not in line


@pytest.mark.parametrize("harm", [flip, zero])
def test_a_flipped_bit_and_zeroes_in_the_weights_are_found_by_reading(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = save(Checkpoints(tmp_path), 1)
    sums = manifest.read(folder)
    assert list(manifest.damage(folder, sums)) == []
    harm(folder / WEIGHTS)
    assert glance(folder) == ""
    (problem,) = manifest.damage(folder, sums)
    assert WEIGHTS in problem and "checksum" in problem


def test_what_was_written_without_a_sum_is_listed_too(tmp_path: Path) -> None:
    async def unaware(folder: Path) -> None:
        (folder / "weights").write_text("new")

    folder = run_virtual(saved(Checkpoints(tmp_path), TrainState(1, 4, 42, 10), unaware))
    assert set(manifest.read(folder)) == {"weights", "state.json"}
    (folder / "weights").write_text("old")
    assert list(manifest.damage(folder, manifest.read(folder)))


def test_a_file_that_did_not_arrive_is_an_error_and_no_checkpoint(tmp_path: Path) -> None:
    async def loses(folder: Path) -> manifest.Sums:
        sums = await write(folder)
        (folder / WEIGHTS).unlink()
        return sums

    with pytest.raises(OSError, match="is missing"):
        run_virtual(saved(Checkpoints(tmp_path), TrainState(1, 4, 42, 10), loses))
    assert list(tmp_path.iterdir()) == []


def test_all_is_on_the_disk_before_the_name_and_the_name_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[
        tuple[str, int]
    ] = []  # the files that were synced, in order, and their sizes at that time
    really, moves = os.fsync, os.replace

    def fsync(handle: int) -> None:
        told.append((os.readlink(f"/proc/self/fd/{handle}"), os.fstat(handle).st_size))
        really(handle)

    def replace(old: Path, new: Path) -> None:
        told.append((str(new), -1))
        moves(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    folder = save(Checkpoints(tmp_path), 1)
    unfinished = f"{folder}.unfinished"
    names = [name for name, _ in told]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {
        name: size for name, size in told if Path(name).suffix in (".json", ".safetensors")
    } == {f"{unfinished}/{path.relative_to(folder)}": path.stat().st_size for path in files}
    assert names[-5:] == [
        f"{unfinished}/manifest.json", f"{unfinished}/policy", unfinished, str(folder), str(tmp_path)
    ]  # fmt: skip


@pytest.mark.parametrize("part", ["weights", "state.json", "manifest.json"])
def test_a_full_disk_leaves_the_former_checkpoint_whole_and_nothing_of_the_new_one(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    first = save(checkpoints, 1)
    really = manifest.SummingFile.write

    def full(self: manifest.SummingFile, data: bytes) -> int:
        if part in os.readlink(f"/proc/self/fd/{self.fileno()}") or (
            part == "weights" and len(data) > 20_000
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(manifest.SummingFile, "write", full)
        with pytest.raises(OSError, match="No space left"):
            save(checkpoints, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert checkpoints.latest() == first and not list(manifest.damage(first, manifest.read(first)))
    assert save(checkpoints, 2) == checkpoints.latest()


def test_the_number_to_keep_counts_those_that_are_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    shorten(save(checkpoints, 2) / WEIGHTS)
    assert checkpoints.latest() == tmp_path / "step_000001"
    save(checkpoints, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000001",
        "step_000002",
        "step_000003",
    ]
    save(checkpoints, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_unfinished_folders_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    for name in ("step_000007.unfinished", "step_000003.discarded"):
        (tmp_path / name).mkdir()
    save(Checkpoints(tmp_path), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_step_without_a_checkpoint_is_refused_naming_those_there_are(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(UserError, match=r"resume_mode=9: .* \(there are none\)"):
        checkpoints.of_step(9)
    save(checkpoints, 5)
    save(checkpoints, 12)
    assert checkpoints.of_step(5).name == "step_000005"
    with pytest.raises(UserError, match=r"resume_mode=9: .* \(there are 5, 12\)"):
        checkpoints.of_step(9)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB, if this machine can mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96k,nr_inodes=64", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this process may not mount file systems")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_keeps_the_former_checkpoint_and_takes_a_later_one(
    small_disk: Path,
) -> None:
    checkpoints = Checkpoints(small_disk, keep=1)
    first, ballast = save(checkpoints, 1), small_disk / "ballast"
    ballast.write_bytes(bytes(32_000))
    with pytest.raises(OSError, match="No space left on device"):
        save(checkpoints, 2)
    assert checkpoints.newest_first() == [first] and not list(
        manifest.damage(first, manifest.read(first))
    )
    ballast.unlink()
    second = save(checkpoints, 3)
    assert [path.name for path in small_disk.iterdir()] == [second.name]
