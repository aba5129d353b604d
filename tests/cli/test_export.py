"""``skyasync export``: wrong arguments, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyasync.cli.export import export
from skyasync.errors import UserError
from skyasync.utils import manifest


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--out", "file"], "^file is a file: name a new folder with --out$"),
        (
            ["--model", "nowhere"],
            "--model='nowhere' is neither a local folder nor a Hugging Face name",
        ),
        (["--model", "."], r"--model='\.' is a folder without config\.json"),
        (
            ["--best"],
            "^--best chooses among the checkpoints of a run, and step_000003 is one checkpoint$",
        ),
    ],
)
def test_wrong_arguments_are_one_line(
    options: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    checkpoint = tmp_path / "step_000003"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text('{"step": 3}')
    recorded = {"config": {"trainer": {"policy": {"model": {"path": "owner/name"}}}}}
    (checkpoint / "config.json").write_text(json.dumps(recorded))
    manifest.write(
        checkpoint,
        {name: manifest.sum_of(checkpoint / name) for name in ("state.json", "config.json")},
    )
    with pytest.raises(UserError, match=line):
        export(["step_000003", *options])
