"""examples/frozen_lake, smaller: games of several turns on 3x3 lakes, in the sync and fully asynchronous plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.frozen_lake import lakes
from examples.frozen_lake.model import build
from skyasync import BasePPOExp, load_config
from tests.end_to_end.runs import Trained, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.recipe]

CONFIG = Path(__file__).parents[2] / "examples" / "frozen_lake" / "config.yaml"
HERE = "tests.end_to_end.test_frozen_lake_recipe"


def train_lakes() -> list[dict]:
    return lakes.train_lakes(512, size=3)


def val_lakes() -> list[dict]:
    return lakes.val_lakes(64, size=3)


@pytest.fixture(scope="module")
def beginner(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Wins about four games in ten."""
    folder = tmp_path_factory.mktemp("frozen_lake") / "model"
    return build(out=folder, progress=False, steps=100, batch_size=32, size=3)


@pytest.mark.parametrize(("plan", "oldest"), [("sync", 0), ("fully_async", 1)])
def test_more_games_are_won_on_lakes_it_has_not_trained_on(
    plan: str, oldest: int, ray_session: None, beginner: str, tmp_path: Path
) -> None:
    experiment = BasePPOExp(load_config([
        "--config", str(CONFIG), f"trainer.policy.model.path={beginner}", f"trainer.plan={plan}",
        f"data.train_data=[{HERE}:train_lakes]", f"data.val_data=[{HERE}:val_lakes]",
        "generator.backend=transformers", "trainer.max_training_steps=16", "trainer.train_batch_size=16",
        "trainer.policy.optimizer_config.lr=1.5e-3", "trainer.eval_interval=0",
        "generator.eval_n_samples_per_prompt=12", "trainer.policy.threads=1", "generator.threads=1",
        f"trainer.runs_dir={tmp_path}", "trainer.run_name=run", "trainer.terminal=lines",
    ]))  # fmt: skip
    experiment.run()
    before, *_, after = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert after["eval/score"] > before["eval/score"] + 0.04
    run = Trained(tmp_path / "run")
    assert max(run.series("staleness/max")) == oldest
    assert all(1 < turns <= lakes.most_steps(3) for turns in run.series("env/steps"))
