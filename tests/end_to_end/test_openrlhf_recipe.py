"""examples/openrlhf, smaller: an OpenRLHF agent file learns by its asynchronous recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyasync import BasePPOExp, load_config
from skyasync.examples.tiny.model import build
from tests.end_to_end.runs import Trained, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.recipe]

EXAMPLE = Path(__file__).parents[2] / "examples" / "openrlhf"


def test_the_agent_is_right_more_often_and_at_its_first_try(
    ray_session: None, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    sizes = {
        "hidden": 64,
        "head_dim": 32,
        "intermediate": 160,
        "steps": 120,
        "lr": 4e-3,
        "tasks": ("sort",),
    }
    model = build(out=tmp_path_factory.mktemp("openrlhf") / "model", progress=False, **sizes)
    experiment = BasePPOExp(load_config([
        "--config", str(EXAMPLE / "config.yaml"), f"generator.agent_func_path={EXAMPLE / 'agent_func.py'}",
        f"trainer.policy.model.path={model}", "generator.backend=transformers", "trainer.max_training_steps=14",
        "trainer.train_batch_size=32", "trainer.eval_interval=0", "trainer.policy.optimizer_config.lr=3e-4",
        "trainer.policy.threads=1", "generator.threads=1", f"trainer.runs_dir={tmp_path}", "trainer.run_name=run",
        "trainer.terminal=lines",
    ]))  # fmt: skip
    experiment.run()
    before, *_, after = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert after["eval/score"] > before["eval/score"] + 0.05
    run = Trained(tmp_path / "run")
    assert run.series("env/tries")[-1] < run.series("env/tries")[0]
    assert max(run.series("staleness/max")) == 1
