"""``skyasync replay``: the settings of the run that trains again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyasync.__main__ import command
from skyasync.config import Config, load_config
from skyasync.config.load import dump_config


def test_nothing_of_the_recorded_run_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, taken = tmp_path / "runs" / "first", list[str]()
    exports = {"trainer.export_path": tmp_path / "policy", "trainer.critic.export_path": tmp_path / "critic"}
    own = [f"{key}={folder}" for key, folder in exports.items()]
    cfg: Config = load_config(
        [*own, "trainer.policy.model.path=x", "data.train_data=[x]", "trainer.algorithm.advantage_estimator=gae"]
    )
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(cfg, secrets=False))
    (run / "schedule.jsonl").touch()

    def main(experiment: type[object], argv: list[str], **_: Any) -> None:
        taken.extend(argv)

    monkeypatch.setattr("skyasync.cli.train.main", main)
    command(["replay", str(run)])
    replayed: Config = load_config(taken)
    assert (replayed.trainer.export_path, replayed.trainer.critic.export_path) == ("", "")
    assert replayed.trainer.run_name == "first-replay"
