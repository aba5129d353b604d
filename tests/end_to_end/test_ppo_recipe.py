"""examples/ppo, smaller: PPO with a critic raises the held-out reward, and the critic learns to predict it."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from skyasync import BasePPOExp, load_config
from tests.end_to_end.runs import PARTS, Trained, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.recipe]

CONFIG = Path(__file__).parents[2] / "examples" / "ppo" / "config.yaml"


@pytest.mark.parametrize("plan", ["sync", "one_step_off"])
def test_a_few_steps_raise_the_held_out_score(
    plan: str, ray_session: None, models: dict[str, str], tmp_path: Path
) -> None:
    BasePPOExp(load_config([
        "--config", str(CONFIG), f"trainer.policy.model.path={models['tied']}", f"trainer.plan={plan}",
        "generator.backend=transformers", "trainer.max_training_steps=25", "trainer.eval_interval=0",
        "trainer.policy.optimizer_config.lr=5e-3", "trainer.critic.optimizer_config.lr=5e-3",
        "trainer.train_batch_size=64", "trainer.policy_mini_batch_size=32", "trainer.epochs=99",
        f"environment.env_class={PARTS}:Sevens", f"data.train_data={PARTS}:train_prompts",
        f"data.val_data={PARTS}:val_prompts", "trainer.policy.threads=1", "generator.threads=1",
        f"trainer.runs_dir={tmp_path}", "trainer.run_name=run", "trainer.terminal=lines",
    ])).run()  # fmt: skip
    before, *steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert before["eval/score"] < 0.2
    assert steps[-1]["eval/score"] > 0.6
    run = Trained(tmp_path / "run")
    values, returns = run.series("critic/values_mean"), run.series("critic/returns_mean")
    assert fmean(returns[-5:]) > 0.6
    assert abs(fmean(values[-5:]) - fmean(returns[-5:])) < 0.1 < returns[-1] - values[0]
