"""The list of runs."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from skyasync.__main__ import command
from skyasync.cli.runs import listed
from skyasync.observability.run_dir import status_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs, one of them running, and a folder without a run."""
    for name, plan, last in (("first", "sync", 3), ("second", "one_step_off", 2)):
        run = tmp_path / name
        run.mkdir()
        (run / "config.yaml").write_text(f"trainer:\n  plan: {plan}\n  max_training_steps: 3\n")
        rows = [
            {"step": step, "time": 100.0 + step, "reward/mean": step / 10}
            for step in range(1, last + 1)
        ]
        rows = [
            {"step": 0, "time": 99.0, "eval/score": 0.25},
            *rows,
            {"step": last, "eval/score": 0.2},
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "no_run").mkdir()
    return tmp_path


def test_runs_are_listed_with_their_state(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with status_file(folder / "second"):
        command(["runs", str(folder)])
    out = capsys.readouterr().out
    (second,) = [line for line in out.splitlines() if "second" in line]
    assert second.split()[:6] == ["second", "one_step_off", "2/3", "0.200", "0.250", "0.200"]
    assert second.split()[-1] == "running"
    assert "first" in out and "no_run" not in out


def test_runs_of_other_users_are_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_file = Path.is_file

    def private(path: Path) -> bool:
        if path.parent.name == "second":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", private)
    command(["runs", str(folder)])
    said = capsys.readouterr()
    assert "first" in said.out and "second" not in said.out
    assert (
        said.err
        == f"note: folders in {folder} that cannot be read: 1 (runs are private to their users)\n"
    )
    with pytest.raises(SystemExit):
        command(["report", str(folder / "second")])
    assert (
        capsys.readouterr().err
        == f"error: {folder / 'second' / 'metrics.jsonl'}: Permission denied\n"
    )


def test_a_run_that_was_resumed_and_lost_before_a_step_took_no_negative_time(folder: Path) -> None:
    with status_file(folder / "first"):
        lost = json.loads((folder / "first" / "status.json").read_text()) | {"born": "1"}
    (folder / "first" / "status.json").write_text(json.dumps(lost))
    first = next(run for run in listed(folder) if run.name == "first")
    assert (first.state, first.seconds) == ("lost", None)


LR = "trainer.policy.optimizer_config.lr"


def test_the_settings_that_differ_are_shown_and_runs_are_sorted_by_a_metric(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lr in (("first", 1e-3), ("second", 3e-4)):
        config = folder / name / "config.yaml"
        plan = "/home/someone/with/a/long/path/to/my_plans/replaying.py:Replaying"
        others = f"  seed: 3\n  policy:\n    optimizer_config:\n      lr: {lr}\n  epochs: {round(lr * 1e4)}\n"
        config.write_text(f"trainer:\n  plan: {plan}\n{others}")
        (folder / name / "origins.json").write_text(json.dumps({LR: "command line"}))
    monkeypatch.setenv("COLUMNS", "120")
    command(["runs", "--sort=reward/mean", str(folder)])
    first, second = (
        line.strip() for line in capsys.readouterr().out.splitlines() if "Replaying" in line
    )
    assert first.startswith("first") and "lr=0.001 epochs=10" in first and "0.300" in first
    assert second.startswith("second") and "lr=0.0003 epochs=3" in second and "seed" not in second
    command(["runs", "--json", str(folder)])
    assert {run["name"]: run["differs"][LR] for run in json.loads(capsys.readouterr().out)} == {
        "first": "0.001", "second": "0.0003",
    }  # fmt: skip
    with pytest.raises(SystemExit):
        command(["runs", "--sort", "reward/meen", str(folder)])
    assert "did you mean 'reward/mean'" in capsys.readouterr().err


def test_the_list_is_there_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with status_file(folder / "first"):
        pass
    command(["runs", "--json", str(folder)])
    newest, other = json.loads(capsys.readouterr().out)
    assert (newest["name"], newest["state"], newest["best_score"]) == ("first", "finished", 0.25)
    assert (other["name"], other["state"], other["seconds"]) == ("second", "unknown", None)


def test_a_folder_without_runs_says_what_a_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(["runs", str(tmp_path)])
    assert "there is no run in" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(["runs", str(tmp_path / "nowhere")])
    assert "there is no folder" in capsys.readouterr().err


def test_the_best_run_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "first" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 0.1, "eval/score": 0.9}) + "\n")
    for argv, name in (([], "first"), (["--sort", "reward/mean"], "second")):
        command(["runs", str(folder), "--best", "--json", *argv])
        assert [run["name"] for run in json.loads(capsys.readouterr().out)] == [name]
    for run in ("first", "second"):
        (folder / run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    with pytest.raises(SystemExit):
        command(["runs", str(folder), "--best"])
    assert (
        "no run has a held-out score (data.val_data); name a metric with --sort"
        in capsys.readouterr().err
    )
