"""examples/rlvr, smaller: two domains at once, each with its own judge, and both learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny.model import build
from skyasync import BasePPOExp, load_config
from tests.end_to_end.runs import Trained, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.recipe]

CONFIG = Path(__file__).parents[2] / "examples" / "rlvr" / "config.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """100,000 parameters that sort 2 in 5 rows of digits and add 1 in 5 pairs of numbers."""
    sizes = {"hidden": 64, "head_dim": 32, "intermediate": 160, "steps": 250, "lr": 4e-3, "tasks": ("sort", "add")}
    return build(out=tmp_path_factory.mktemp("rlvr") / "model", progress=False, **sizes)


def test_the_held_out_score_rises_in_both_domains(ray_session: None, model: str, tmp_path: Path) -> None:
    experiment = BasePPOExp(load_config([
        "--config", str(CONFIG), f"trainer.policy.model.path={model}", "trainer.plan=one_step_off",
        "generator.backend=transformers", "trainer.max_training_steps=30", "trainer.eval_interval=0",
        "trainer.policy.optimizer_config.lr=1e-3", "trainer.policy.threads=1", "generator.threads=1",
        f"trainer.runs_dir={tmp_path}", "trainer.run_name=run", "trainer.progress=false",
    ]))  # fmt: skip
    experiment.run()
    before, *steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    after = steps[-1]
    assert after["eval/score/sort"] > before["eval/score/sort"] + 0.15
    assert after["eval/score/add"] > before["eval/score/add"] + 0.05
    run = Trained(tmp_path / "run")
    assert sum(run.series("reward/prompts/add")) == pytest.approx(15, rel=0.1)  # half of the prompts, as is asked for
    for row in run.metrics:
        assert row["env/math_verify"] == row["env/add/math_verify"] == row["reward/mean/add"]
        assert row["env/exact_match"] == row["reward/mean/sort"]
        assert row["env/math_verify/unjudged"] == 0
