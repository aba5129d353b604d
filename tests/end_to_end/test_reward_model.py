"""A reward model in an actor with its own device, in addition to an environment's reward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.end_to_end.runs import Train, Trained

pytestmark = pytest.mark.slow


@pytest.mark.matrix
def test_scores_join_what_the_environment_gives(
    train: Train, sync_run: Trained, models: dict[str, str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(models["tied"], num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    run = train(
        "trainer.max_training_steps=1", f"trainer.reward.model.path={tmp_path / 'judge'}", "trainer.reward.weight=0.5",
        "trainer.reward.mean=2.0", "trainer.reward.std=4.0", "trainer.placement.reward_num_gpus_per_node=2",
    )  # fmt: skip
    first, plain = run.metrics[0], sync_run.metrics[0]
    scores = first["env/reward_model"]
    assert first["reward/mean"] == pytest.approx(
        plain["reward/mean"] + 0.5 * (scores - 2.0) / 4.0, abs=1e-5
    )
    assert first["policy/loss"] != plain["policy/loss"]
