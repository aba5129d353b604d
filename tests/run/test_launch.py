"""The output of a program when its run has ended."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

import skyasync.run.ray_cluster
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.observability.run_dir import RunDirectory
from skyasync.run import launch as program
from skyasync.run.experiment import BasePPOExp


@pytest.mark.parametrize("steps_of_this_start", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_a_resumed_run_that_fails_before_its_first_step_does_not_show_the_summary_of_the_former_segment(
    steps_of_this_start: int,
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run").mkdir()
    folder = RunDirectory(tmp_path, "run", resume=True)

    def log(step: int, moment: float) -> None:
        with folder.metrics.open("a") as file:
            file.write(
                json.dumps({"step": step, "time": moment, "time/step_s": 1.0, "reward/mean": 0.5})
                + "\n"
            )

    log(1, time.time() - 3600)

    def train(*_: object) -> dict[str, float]:
        for step in range(steps_of_this_start):
            log(2 + step, time.time())
        if fails:
            raise RuntimeError("no model")
        return {}

    monkeypatch.setattr(program, "run_in_controller", train)
    monkeypatch.setattr(skyasync.run.ray_cluster, "cluster", lambda *_, **__: nullcontext(False))
    cfg = Config()
    cfg.trainer.report = False
    with pytest.raises(RuntimeError, match="no model") if fails else nullcontext():
        program.run(BasePPOExp(cfg), folder)
    assert ("1.00 s each" in capsys.readouterr().out) == (not fails or steps_of_this_start > 0)


def test_a_resumed_run_that_does_not_start_has_its_own_error_not_that_of_the_command_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_small(*_: object, **__: object) -> None:
        raise UserError("there are too few devices")

    monkeypatch.setattr(skyasync.run.ray_cluster, "cluster", too_small)
    (tmp_path / "resumed").mkdir()
    (tmp_path / "resumed" / "error.txt").write_text("RuntimeError: of yesterday")
    for name, resume in (("resumed", True), ("new", False)):
        with pytest.raises(UserError, match="too few"):
            program.run(BasePPOExp(Config()), RunDirectory(tmp_path, name, resume=resume))
    assert "yesterday" not in (error := (tmp_path / "resumed" / "error.txt").read_text())
    assert error.endswith("UserError: there are too few devices\n")
    assert not (tmp_path / "new").exists()
