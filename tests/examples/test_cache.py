import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyasync.examples.tiny_models import cache_folder, made_once


def test_environment_decides_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SKYASYNC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "skyasync"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "skyasync"
    monkeypatch.setenv("SKYASYNC_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_existing_folder_is_not_made_again(tmp_path):
    calls = []

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / "file").write_text("made")

    for _ in range(2):
        assert made_once(tmp_path / "thing", make) == tmp_path / "thing"
    assert len(calls) == 1
    assert (tmp_path / "thing" / "file").read_text() == "made"


def test_a_failed_build_leaves_no_files(tmp_path):
    def make(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError, match="out of disk"):
        made_once(tmp_path / "thing", make)
    assert list(tmp_path.iterdir()) == []


def test_of_two_making_it_at_once_both_get_the_same_complete_folder(tmp_path):
    both_halfway = threading.Barrier(2)

    def make(temporary: Path) -> None:
        (temporary / "file").write_text("made")
        both_halfway.wait(timeout=60)

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda _: made_once(tmp_path / "thing", make), range(2)))
    assert got == [tmp_path / "thing"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]
    assert (tmp_path / "thing" / "file").read_text() == "made"
