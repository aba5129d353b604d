"""examples/online, smaller: a model learns from episodes that a separate program plays and rewards over HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import Train, outside_environment

pytestmark = [pytest.mark.slow, pytest.mark.recipe]


def test_a_model_learns_from_sessions_of_another_process(train: Train, tmp_path: Path) -> None:
    player = subprocess.Popen(
        [sys.executable, "-m", "tests.end_to_end.online_player", str(tmp_path / "run")],
        env=outside_environment(),
    )
    try:
        run = train(
            "generator.agent_program=online", 'environment.env_class=""', "environment.on_error=mask",
            "generator.episode_timeout_s=60", "generator.n_samples_per_prompt=8", "trainer.train_batch_size=16",
            "trainer.policy.optimizer_config.lr=5e-3", "trainer.plan=one_step_off", "trainer.max_training_steps=14",
        )  # fmt: skip
        assert player.wait(30) == 0, "it ends when the run does"
    finally:
        player.kill()
    rewards = run.series("reward/mean")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert run.series("env/given_up") == [0.0] * 14
    assert run.series("staleness/max") == [0.0] + [1.0] * 13
    assert not (run.folder / "endpoint.json").exists()
