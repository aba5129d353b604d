"""The subcommand by which engines join a run and leave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyasync.__main__ import command
from skyasync.inference.elastic import FILE, read_engine_list, write_engine_list


def run(folder: Path, *words: str) -> list[str]:
    command(["engines", str(folder), *words])
    return read_engine_list((folder / FILE).read_text())


def test_engines_are_added_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_engine_list(tmp_path / FILE, ["0", "1"])
    assert run(tmp_path) == ["0", "1"]
    assert run(tmp_path, "add") == ["0", "1", "2"]
    assert run(tmp_path, "remove", "0", "1") == ["2"]
    assert run(tmp_path, "add", "5", "6") == ["2", "5", "6"]
    assert capsys.readouterr().out.split("\n")[:2] == ["0", "1"]
    write_engine_list(tmp_path / FILE, ["http://a:1"])
    assert run(tmp_path, "add", "http://b:2/") == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize(
    ("there", "words", "said"),
    [
        (["0"], ["remove", "0"], "one engine must stay"),
        (["0", "1"], ["remove", "3"], "there is no 3 among 0, 1"),
        (["0", "1"], ["remove"], "needs the names"),
        (["0"], ["add", "http://a:1"], "starts its engines itself"),
        (["0"], ["add", "0"], "is already part of the run"),
        (["http://a:1"], ["add", "2"], "is not the address of a server"),
        (["http://a:1"], ["add"], "needs the address of a server"),
        (["0"], ["drop"], "none of list, add, remove"),
        ([], ["add"], "is not there"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    there: list[str],
    words: list[str],
    said: str,
) -> None:
    if there:
        write_engine_list(tmp_path / FILE, there)
    with pytest.raises(SystemExit):
        command(["engines", str(tmp_path), *words])
    assert said in capsys.readouterr().err
    assert not there or read_engine_list((tmp_path / FILE).read_text()) == there
