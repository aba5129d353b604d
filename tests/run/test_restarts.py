"""How often failed processes may be restarted, and which checkpoint is resumed."""

from __future__ import annotations

import json
import time
from pathlib import Path

from skyasync.config.resume import Resume, settle_resume_mode
from skyasync.config.schema import TrainerConfig
from skyasync.observability.jsonl import read_rows, write_rows
from skyasync.run.recovery import HOUR_S, NAME, Restarts


def test_workers_and_controller_draw_on_one_budget_of_the_hour(tmp_path: Path) -> None:
    program, controller = Restarts(tmp_path, per_hour=2), Restarts(tmp_path, per_hour=2)
    controller.began = program.began
    error = RuntimeError("gone")
    assert controller.take("a process of the policy", 3, error)
    assert program.take("the controller", 5, error)
    assert not controller.take("a process of the policy", 6, error)
    assert error.__notes__ == [
        "a process of the policy is not started again: 2 of 2 restarts this hour are used (trainer.max_restarts)"
    ]
    program.began -= 2 * HOUR_S
    first, second = read_rows(tmp_path / NAME)
    write_rows(tmp_path / NAME, [first | {"time": first["time"] - HOUR_S}, second])
    assert Restarts(tmp_path, 2, program.began).used() == 1, "the first is more than an hour ago"


def test_restarts_of_a_command_before_do_not_count_and_none_may_be_allowed(tmp_path: Path) -> None:
    assert Restarts(tmp_path, per_hour=1).take("the controller", 1, RuntimeError())
    time.sleep(0.01)
    assert Restarts(tmp_path, per_hour=1).used() == 0
    error = RuntimeError()
    assert not Restarts(tmp_path, per_hour=0).take("the controller", 1, error)
    assert not hasattr(error, "__notes__")


def test_a_folder_that_cannot_be_written_is_counted_all_the_same(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path / "gone", per_hour=1)
    assert [restarts.take("the controller", 1, RuntimeError()) for _ in range(2)] == [True, False]


def test_only_a_checkpoint_of_this_command_is_gone_on_from(tmp_path: Path) -> None:
    """Otherwise from its start: ``resume_mode=40`` leaves newer checkpoints of another attempt in the folder."""
    restarts = Restarts(tmp_path, per_hour=1)
    assert restarts.resume_mode(tmp_path, "none") == "none"
    for step, seconds in ((60, -10.0), (40, 10.0)):
        folder = tmp_path / f"step_{step:06d}"
        folder.mkdir()
        (folder / "state.json").write_text(
            json.dumps({"written_ns": int((restarts.began + seconds) * 1e9)})
        )
        if step == 60:
            assert restarts.resume_mode(tmp_path, "40") == "40"
    assert restarts.resume_mode(tmp_path, "40") == "latest"


def test_a_named_run_that_has_checkpoints_is_gone_on_with_by_itself(tmp_path: Path) -> None:
    def settled(**settings: str) -> str:
        cfg = TrainerConfig(runs_dir=str(tmp_path), **settings)  # type: ignore[arg-type]
        line = settle_resume_mode(cfg)
        assert bool(line) == (cfg.resume_mode == "latest" and "resume_mode" not in settings)
        return cfg.resume_mode

    assert settled(run_name="mine") == "none"
    (tmp_path / "mine" / "checkpoints" / "step_000003").mkdir(parents=True)
    assert settled(run_name="mine") == "latest"
    assert Resume.of(TrainerConfig(runs_dir=str(tmp_path), run_name="mine")).requested
    assert (
        settled()
        == settled(run_name="other")
        == settled(run_name="mine", resume_mode="none")
        == "none"
    )
