"""Weight files in shared memory: complete before they have their name, and always removed."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from skyasync.errors import UserError
from skyasync.weight_sync.tensors import digests_of, specs_of
from skyasync.weight_sync.transfers import file as shared_memory
from skyasync.weight_sync.transfers.file import (
    FileSender,
    read_metadata,
    read_weights,
    remove_weights,
    sweep,
    write_one_by_one,
    write_weights,
)

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "directories", lambda: (tmp_path,))
    return tmp_path


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left_by(path, pid):
    """The file's name as another process of this machine would choose it."""
    name = Path(path).name.replace(f"-{os.getpid()}-", f"-{pid}-")
    assert name != Path(path).name
    return Path(path).with_name(name)


def test_what_is_written_is_read_and_removed(folder):
    path = write_weights(WEIGHTS)
    found = read_weights(path)
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    assert found["b"].dtype == torch.bfloat16
    remove_weights(path)
    remove_weights(path)
    assert not list(folder.iterdir())


def test_the_file_carries_the_digests_of_what_was_written(folder):
    assert read_metadata(write_weights(WEIGHTS))[0] == digests_of(WEIGHTS)


def test_every_write_has_a_name_of_its_own(folder):
    assert len({write_weights(WEIGHTS) for _ in range(3)}) == 3


def test_the_next_writer_removes_files_of_ended_processes_finished_or_not(folder):
    mine, pid = write_weights(WEIGHTS), ended_process()
    finished = left_by(mine, pid)
    finished.touch()
    finished.with_suffix(".writing").touch()
    another = write_weights(WEIGHTS)
    assert sorted(folder.iterdir()) == sorted(map(Path, (mine, another)))


def test_files_of_running_processes_and_of_other_programs_stay(folder):
    mine = write_weights(WEIGHTS)
    others = [
        left_by(mine, os.getppid()),
        folder / "skyasync-weights-what-ever",
        folder / "something-else",
    ]
    for path in others:
        path.touch()
    sweep()
    assert all(path.exists() for path in (Path(mine), *others))


def test_files_of_another_containers_processes_stay(folder, monkeypatch):
    """Containers may share the memory. Processes of another container are invisible, but may still run."""
    mine, pid = write_weights(WEIGHTS), ended_process()
    theirs = left_by(mine, pid)
    theirs.touch()
    monkeypatch.setattr(shared_memory, "_namespace", lambda folder: "another")
    sweep()
    assert theirs.exists()


def test_files_that_may_not_be_removed_are_no_error(folder, monkeypatch):
    """Files of another user, in a folder where users may remove only their own files."""
    mine = write_weights(WEIGHTS)
    left_by(mine, ended_process()).touch()

    def forbidden(path, **options):
        raise PermissionError(path)

    monkeypatch.setattr(Path, "unlink", forbidden)
    sweep()


def test_a_failed_write_leaves_nothing(folder):
    def some():
        yield next(iter(WEIGHTS.items()))
        assert list(folder.iterdir()), "half of a file"
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_one_by_one(specs_of(WEIGHTS), some())
    assert not list(folder.iterdir())


def test_weights_that_are_on_another_machine_are_an_error_that_names_the_key(folder):
    with pytest.raises(FileNotFoundError, match=r"generator\.weight_sync_backend=nccl"):
        read_weights(str(folder / "skyasync-weights-7-1-a.safetensors"))


def test_shared_memory_too_small_for_the_weights_is_passed_over(folder, monkeypatch):
    """In a container, shared memory often has 64 MB."""
    small = folder / "small"
    small.mkdir()
    free = {small: 8, folder: 1 << 20}
    monkeypatch.setattr(shared_memory, "directories", lambda: tuple(free))
    monkeypatch.setattr(
        shared_memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path])
    )
    assert Path(write_weights(WEIGHTS)).parent == folder
    free[folder] = 8
    with pytest.raises(UserError, match="the weights take 0 MiB"):
        write_weights(WEIGHTS)


def test_a_file_that_is_kept_has_no_name_and_can_be_read_until_it_is_dropped_or_its_keeper_ends(
    folder,
):
    kept = FileSender(list, list, 0)
    path = kept.keep(write_weights(WEIGHTS))
    assert not list(folder.iterdir())
    command = f"import os; print(os.stat({path!r}).st_size > 0)"
    assert (
        subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout
        == "True\n"
    )
    found = read_weights(path)
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    assert read_metadata(path)[0] == digests_of(WEIGHTS)
    other = kept.keep(write_weights({"c": torch.zeros(2)}))
    assert set(read_weights(other)) == {"c"}
    kept.remove(other)
    kept.remove(other)
    with pytest.raises(FileNotFoundError):
        read_weights(other)


@pytest.mark.parametrize("named", [False, True])
def test_weights_are_readable_by_their_owner_alone_also_where_several_machines_see_them(
    tmp_path, named
):
    (tmp_path / "seen").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        path = Path(write_weights(WEIGHTS, str(tmp_path / "seen") if named else ""))
    finally:
        os.umask(before)
    assert path.parent == (tmp_path / "seen" if named else tmp_path)
    assert [stat.S_IMODE(each.stat().st_mode) for each in path.parent.glob("skyasync*")] == [0o600]
    kept = FileSender(list, list, 0, str(tmp_path) if named else "")
    assert stat.S_IMODE(os.stat(kept.keep(str(path))).st_mode) == 0o600
    kept.remove(kept._retained_file[0])
