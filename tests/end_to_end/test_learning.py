"""The reward rises if and only if the policy is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.runs import PARTS, Train, read_lines

pytestmark = pytest.mark.slow

EVALUATED = (
    f"data.val_data={PARTS}:val_prompts",
    "trainer.eval_before_train=true",
    "generator.eval_n_samples_per_prompt=4",
    "generator.eval_sampling_params.temperature=null",
)


def test_a_few_steps_raise_the_held_out_score(train: Train) -> None:
    run = train(
        "trainer.plan=one_step_off", "trainer.max_training_steps=20", "trainer.policy.optimizer_config.lr=5e-3",
        "trainer.train_batch_size=16", "generator.n_samples_per_prompt=8", *EVALUATED,
    )  # fmt: skip
    scores = [
        row["eval/score"] for row in read_lines(run.folder / "metrics.jsonl") if "eval/score" in row
    ]
    assert scores[0] < 0.2
    assert scores[-1] > 0.6


@pytest.mark.matrix
def test_learning_rate_zero_changes_nothing(
    train: Train, models: dict[str, str], tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    run = train(
        "trainer.plan=one_step_off", "trainer.max_training_steps=3", "trainer.policy.optimizer_config.lr=0",
        f"trainer.export_path={exported}", *EVALUATED,
    )  # fmt: skip
    before, after = (
        load_file(Path(folder) / "model.safetensors") for folder in (models["tied"], exported)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(norm > 0 for norm in run.series("policy/grad_norm"))
    # The same weights and the same seeds: the evaluation is repeated exactly, not only within its noise.
    first, *_, last = read_lines(run.folder / "metrics.jsonl")
    assert first["eval/score"] == last["eval/score"]
    assert len(set(run.series("sync/logprob_gap"))) == 1
