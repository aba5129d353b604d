"""When workers may be restarted."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyasync.config.schema import Config
from skyasync.config.secrets import Secrets
from skyasync.observability.jsonl import read_rows
from skyasync.observability.run_dir import RunDirectory
from skyasync.processes import born
from skyasync.run.recovery import NAME, Recovery
from skyasync.weight_sync.sync import WeightSync

FAILURE = RuntimeError("gone")


def restarting(folder: Path, **settings: Any) -> Recovery:
    cfg = Config()
    vars(cfg.trainer).update(settings)
    unused: Any = None
    parts = SimpleNamespace(
        dispatch=SimpleNamespace(lost=("policy", FAILURE)),
        weight_sync=WeightSync(unused, unused, probe=()),
    )
    run: Any = SimpleNamespace(cfg=cfg, components=parts)
    return Recovery(run, folder)


def test_workers_that_end_with_the_program_are_not_started_again(tmp_path: Path) -> None:
    """They end before or after the controller, depending on timing."""
    found = restarting(tmp_path, ckpt_interval=1)
    with subprocess.Popen(["sleep", "60"]) as program:
        found._program = program.pid, born(program.pid)
        assert found.lost_workers(3)
        program.kill()
        while born(program.pid):
            time.sleep(0.01)
        assert not found.lost_workers(4), "no call has been made since"
    assert not found.lost_workers(4)
    assert [row["step"] for row in read_rows(tmp_path / NAME)] == [3]


@pytest.mark.parametrize(
    "settings, again",
    [({}, False), ({"ckpt_interval": 5}, True), ({"ckpt_interval": 5, "max_restarts": 0}, False)],
)
def test_there_must_be_something_to_go_on_from(
    settings: dict[str, Any], again: bool, tmp_path: Path
) -> None:
    assert restarting(tmp_path, **settings).lost_workers(3) is again


def test_secrets_are_hidden_in_the_files_of_a_controller_that_was_started_again(
    tmp_path: Path,
) -> None:
    recovery, folder = restarting(tmp_path, ckpt_interval=5), RunDirectory(tmp_path, "run")
    folder.secrets = Secrets(["hunter2-hunter2"])
    run: Any = recovery._experiment
    run.run_dir = folder
    assert recovery.lost_controller(3, FAILURE)
    run.run_dir.write_samples(4, [{"prompt": "the key is hunter2-hunter2"}])
    assert read_rows(run.run_dir.samples) == [{"step": 4, "prompt": "the key is ***"}]
