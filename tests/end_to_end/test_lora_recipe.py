"""examples/ppo's task with GRPO and adapters of rank 8 on frozen weights: the held-out reward rises."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from skyasync.__main__ import command
from tests.end_to_end.runs import PARTS, read_lines, train_in

pytestmark = [pytest.mark.slow, pytest.mark.recipe]


def test_a_few_steps_raise_the_held_out_score(
    ray_session: None, models: dict[str, str], tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    run = train_in(tmp_path / "runs", models["tied"])(
        "trainer.policy.lora.rank=8", "trainer.policy.lora.alpha=16", "trainer.policy.optimizer_config.lr=1e-2",
        "trainer.max_training_steps=20", "trainer.train_batch_size=16", "generator.n_samples_per_prompt=8",
        "trainer.algorithm.use_kl_loss=true", "trainer.eval_before_train=true", f"data.val_data={PARTS}:val_prompts",
        "trainer.ckpt_interval=20", f"trainer.export_path={exported}",
    )  # fmt: skip
    before, *steps = read_lines(run.folder / "metrics.jsonl")
    assert before["eval/score"] < 0.2
    assert steps[-1]["eval/score"] > 0.5
    assert max(run.series("sync/logprob_gap_mean")) < 1e-4
    command(["export", str(run.folder), "--out", str(tmp_path / "again")])
    folders = (exported, tmp_path / "again")
    one, other = (
        dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()) for folder in folders
    )
    assert all(one[name].equal(other[name]) for name in one)
