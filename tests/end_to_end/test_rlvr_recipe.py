"""examples/rlvr, smaller: two domains at once, each with its own reward function, and both learn."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from skyasync import BasePPOExp, load_config
from skyasync.examples.tiny.model import build
from tests.end_to_end.runs import Trained, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.recipe]

CONFIG = Path(__file__).parents[2] / "examples" / "rlvr" / "config.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """100,000 parameters that sort 2 in 5 rows of digits and add 1 in 5 pairs of numbers."""
    sizes = {
        "hidden": 64,
        "head_dim": 32,
        "intermediate": 160,
        "steps": 250,
        "lr": 4e-3,
        "tasks": ("sort", "add"),
    }
    return build(out=tmp_path_factory.mktemp("rlvr") / "model", progress=False, **sizes)


def test_the_reward_rises_in_both_domains_and_the_held_out_score_with_it(
    ray_session: None, model: str, tmp_path: Path
) -> None:
    experiment = BasePPOExp(load_config([
        "--config", str(CONFIG), f"trainer.policy.model.path={model}", "trainer.plan=one_step_off",
        "generator.backend=transformers", "trainer.max_training_steps=50", "trainer.eval_interval=0",
        "trainer.policy.optimizer_config.lr=5e-4", "trainer.policy.threads=1", "generator.threads=1",
        f"trainer.runs_dir={tmp_path}", "trainer.run_name=run", "trainer.terminal=lines",
    ]))  # fmt: skip
    experiment.run()
    before, *steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    after = steps[-1]
    assert after["eval/score/sort"] > before["eval/score/sort"] + 0.1
    run = Trained(tmp_path / "run")
    for domain in (
        "sort",
        "add",
    ):  # about 5,000 samples in each mean: the remaining noise is under 0.01
        rewards = run.series(f"reward/mean/{domain}")
        assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.08
    assert sum(run.series("reward/prompts/add")) == pytest.approx(
        25, rel=0.1
    )  # half of the prompts, by the settings
    for row in run.metrics:
        assert row["env/math_verify"] == row["env/add/math_verify"] == row["reward/mean/add"]
        assert row["env/exact_match"] == row["reward/mean/sort"]
        assert row["env/math_verify/no_reward"] == 0
