"""``skyasync replay``: its arguments, the settings of the run that trains again, and what it says without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyasync.__main__ import command
from skyasync.config import Config, load_config
from skyasync.config.load import dump_config


def test_nothing_of_the_recorded_run_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, taken = tmp_path / "runs" / "first", list[str]()
    exports = {
        "trainer.export_path": tmp_path / "policy",
        "trainer.critic.export_path": tmp_path / "critic",
    }
    own = [f"{key}={folder}" for key, folder in exports.items()]
    cfg: Config = load_config(
        [
            *own,
            "trainer.policy.model.path=x",
            "data.train_data=[x]",
            "trainer.algorithm.advantage_estimator=gae",
        ]
    )
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(cfg, secrets=False))
    (run / "trajectories").mkdir()
    (run / "trajectories" / "step_000001.parquet").touch()

    def main(experiment: type[object], argv: list[str], **_: Any) -> None:
        taken.extend(argv)

    monkeypatch.setattr("skyasync.cli.train.main", main)
    command(["replay", str(run)])
    replayed: Config = load_config(taken)
    assert (replayed.trainer.export_path, replayed.trainer.critic.export_path) == ("", "")
    assert replayed.trainer.run_name == "first-replay"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "lr=1e-3"
    folder.mkdir()
    (folder / "config.yaml").write_text("trainer:\n  plan: sync\n")
    return folder


def test_a_runs_name_may_look_like_a_setting(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"step": 1, "prompt_id": "e0-i3-r0", "prompt": "Two?", "response": "2", "reward": 1.0}
    (run / "samples.jsonl").write_text(json.dumps(row) + "\n")
    command(["replay", str(run), "--show"])
    assert "e0-i3-r0  step 1  reward 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ([], "episodes"),
        (["--nonfinite"], "episodes with a non-finite value"),
        (["--step", "3"], "episodes of step 3"),
        (["--episode", "e1"], "episode e1"),
    ],
)
def test_what_a_run_has_not_recorded_is_named(
    options: list[str], missing: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(["replay", str(run), "--show", *options])
    assert capsys.readouterr().err == f"error: {run} has recorded no {missing}\n"
