"""The folder in which the same command resumes, if the run ended before its first checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from skyasync.config.resume import Resume, settle_resume_mode, settle_run_name
from skyasync.config.schema import TrainerConfig


def trainer(folder: Path, **settings: object) -> TrainerConfig:
    return TrainerConfig(**{"runs_dir": str(folder), "run_name": "mine", **settings})  # type: ignore[arg-type]


def checkpoint(folder: Path, name: str, when: float) -> None:
    made = folder / name / "checkpoints" / "step_000002"
    made.mkdir(parents=True)
    (made / "state.json").write_text(json.dumps({"written_ns": int(when)}))
    os.utime(made, (100 - when, 100 - when))  # as after a copy


def test_the_run_resumes_in_the_newest_folder_with_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    checkpoint(tmp_path, "mine-2", 50.0)
    checkpoint(tmp_path, "mine-3", 40.0)
    checkpoint(tmp_path, "mine-other", 99.0)
    cfg = trainer(tmp_path)
    line = settle_run_name(cfg)
    assert (
        line == "the run mine ended before its first checkpoint, and mine-2 is its newest attempt"
    )
    assert cfg.run_name == "mine-2" and Resume.of(cfg).requested
    assert "going on with the run mine-2" in settle_resume_mode(cfg)


def test_a_name_whose_folder_was_deleted_is_free_for_a_new_run(tmp_path: Path) -> None:
    checkpoint(tmp_path, "mine-2", 50.0)
    cfg = trainer(tmp_path)
    line = settle_run_name(cfg)
    assert (
        line == "a new run mine, since it has no folder; trainer.run_name=mine-2 continues mine-2"
    )
    assert cfg.run_name == "mine" and not Resume.of(cfg).requested
    assert settle_resume_mode(cfg) == ""


@pytest.mark.parametrize(
    "settings",
    [
        {"resume_mode": "none"},
        {"resume_mode": "latest"},
        {"run_name": ""},
        {"ckpt_path": "elsewhere"},
    ],
)
def test_only_where_the_command_leaves_it_open(settings: dict[str, str], tmp_path: Path) -> None:
    checkpoint(tmp_path, "mine-2", 50.0)
    cfg = trainer(tmp_path, **settings)
    settle_run_name(cfg)
    assert cfg.run_name == settings.get("run_name", "mine")


def test_a_run_with_checkpoints_of_its_own_stays_where_it_is(tmp_path: Path) -> None:
    checkpoint(tmp_path, "mine", 10.0)
    checkpoint(tmp_path, "mine-2", 50.0)
    cfg = trainer(tmp_path)
    settle_run_name(cfg)
    assert cfg.run_name == "mine"
