"""``skyasync forecast`` on the folders of real runs, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyasync.__main__ import command
from tests.end_to_end.runs import train_in

pytestmark = pytest.mark.slow


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        command(["forecast", *arguments])
    return capsys.readouterr().err


@pytest.mark.matrix
def test_two_runs_give_a_forecast_of_each_plan(
    ray_session: None, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("trainer.max_training_steps=12", "trainer.policy.optimizer_config.lr=2e-3")
    stale = ("trainer.plan=one_step_off", "trainer.async_queue_size=2")
    runs = [
        str(train_in(tmp_path / name, models["tied"])(*settings, *own).folder)
        for name, own in (("sync", ("trainer.plan=sync",)), ("stale", stale))
    ]
    capsys.readouterr()
    command(["forecast", *runs, "--target", "0.9", "--bounds", "1,3", "simulate.plans=[sync,fully_async]"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("pilot: 2 runs, mean staleness up to 1.")
    rows = [line.split() for line in lines if line.startswith(("sync ", "fully_async "))]
    assert [row[:5] for row in rows if row[0] == "sync"] == [["sync", "-", "1", "+", "1"]]
    assert sorted(row[1] for row in rows) == ["-", "1", "3"]
    (sync,) = [row for row in rows if row[0] == "sync"]
    assert float(sync[8]) == pytest.approx(float(sync[5]) * float(sync[7]) / 60, rel=0.1)
    assert [line for line in lines if line.startswith("recommended: trainer.plan=")]
    assert [line.split(":")[0] for line in lines[-2:]] == ["one more engine", "one more trainer device"]

    assert "the mean staleness 0: its cost needs two" in failure([runs[0], "--target", "0.9"], capsys)
    assert "the costs" not in (said := failure([runs[1], runs[1], "--target", "0.9"], capsys)) and "staleness" in said
    assert "--ceiling 1 is the largest possible reward: the target is 2" in failure([*runs, "--target", "2"], capsys)
    assert "steps have eval/score" in failure([*runs, "--target", "0.9", "--metric", "eval/score"], capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs/none"], "needs the reward to reach: --target 0.8"),
        (["--target", "0.8"], "needs folders of pilot runs"),
        (["runs/none", "--target", "much"], "--target much: not a number"),
        (["runs/none", "--target", "0.8", "--bounds", "1,x"], "--bounds x: not a whole number"),
        (["runs/none", "--target", "0.8"], "runs/none: 0 steps have reward/mean"),
        (["runs/none", "--targt", "0.8"], "did you mean --target?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = failure(arguments, capsys)
    assert said in error and error.count("\n") == 1
