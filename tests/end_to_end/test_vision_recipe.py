"""examples/vision, shorter: counting in images improves, and engine and trainer agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyasync import BasePPOExp, load_config
from tests.end_to_end.runs import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.recipe]

CONFIG = Path(__file__).parents[2] / "examples" / "vision" / "config.yaml"


@pytest.mark.parametrize(
    "settings",
    [
        [],
        pytest.param(
            ["generator.backend=vllm", "trainer.plan=one_step_off"], marks=pytest.mark.vllm
        ),
    ],
    ids=["embedded, sync", "vllm, one_step_off"],
)
def test_counting_in_images_improves(
    ray_session: None, tmp_path: Path, settings: list[str]
) -> None:
    BasePPOExp(load_config([
        "--config", str(CONFIG), "trainer.max_training_steps=60", "trainer.eval_interval=0",
        "generator.eval_n_samples_per_prompt=8",
        "trainer.policy.threads=1", "generator.threads=1", f"trainer.runs_dir={tmp_path}", "trainer.run_name=run",
        "trainer.terminal=lines", *settings,
    ])).run()  # fmt: skip
    before, *steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert before["eval/score"] < 0.6
    assert steps[-1]["eval/score"] > before["eval/score"] + 0.1  # its standard error is 0.02
