"""SmolLM2 with low-rank adapters: the held-out reward rises, and engines are sent the adapters alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.smollm2.model import FOLDER
from skyasync import BasePPOExp, load_config
from skyasync.examples.tiny_models import cache_folder
from tests.end_to_end.runs import Trained, read_lines

MODEL = cache_folder() / FOLDER
EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.recipe,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not MODEL.is_dir(), reason="needs SmolLM2 in the cache (examples/smollm2/model.py)"
    ),
]


def test_adapters_raise_the_held_out_score_and_travel_alone(
    ray_session: None, tmp_path: Path
) -> None:
    cfg = load_config([
        "--config", str(EXAMPLE / "config.yaml"), "--config", str(EXAMPLE / "lora.yaml"), "trainer.plan=one_step_off",
        "trainer.max_training_steps=20", "generator.backend=transformers", "trainer.policy.threads=1",
        "generator.threads=1", f"trainer.runs_dir={tmp_path}", "trainer.run_name=run", "trainer.terminal=lines",
        "trainer.report=false",
    ])  # fmt: skip
    BasePPOExp(cfg).run()
    run = Trained(tmp_path / "run")
    before = read_lines(run.folder / "metrics.jsonl")[0]
    assert before["eval/score"] < 0.4
    assert run.metrics[-1]["eval/score"] > 0.8
    whole = (
        2 * (MODEL / "model.safetensors").stat().st_size
    )  # which are bfloat16 there, and float32 in the run
    assert 0 < max(run.series("sync/bytes")) < whole / 25
