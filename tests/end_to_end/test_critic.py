"""PPO with critic actors: with the policy and on separate devices, sharded, saved, resumed, in every plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.end_to_end.runs import Train

pytestmark = pytest.mark.slow

PPO = (
    "trainer.algorithm.advantage_estimator=gae", "trainer.algorithm.gae_whiten=false", "trainer.algorithm.lambd=0.95",
    "trainer.critic.optimizer_config.lr=1e-3",
)  # fmt: skip
ALIKE = ("critic/loss", "critic/grad_norm", "critic/values_mean", "critic/returns_mean", "critic/explained_variance",
         "policy/loss", "policy/grad_norm", "reward/mean")  # fmt: skip


@pytest.mark.matrix
def test_ranks_and_devices_change_nothing_and_a_run_in_pieces_is_the_run(
    train: Train, tmp_path: Path
) -> None:
    """One rank colocated with the policy; two of each on separate devices, from which one of each resumes."""
    one = train(*PPO, "trainer.max_training_steps=2", "trainer.run_name=one")
    kept = (
        "trainer.ckpt_interval=1",
        f"trainer.ckpt_path={tmp_path / 'saved'}",
        "trainer.resume_mode=latest",
    )
    two = train(
        *PPO, *kept, "trainer.max_training_steps=2", "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.placement.colocate_policy_critic=false", "trainer.placement.critic_num_gpus_per_node=2",
        "trainer.critic.model.dtype=float32",
    )  # fmt: skip
    for name in ALIKE:
        assert two.series(name) == pytest.approx(one.series(name), abs=1e-5), name
    losses = two.series("critic/loss")  # the resumed run writes into the same folder
    saved = tmp_path / "saved" / "step_000002"
    assert len(list((saved / "critic").glob("*.safetensors"))) == 2
    exported = tmp_path / "critic"
    more = train(
        *PPO,
        *kept,
        "trainer.max_training_steps=3",
        "trainer.plan=streamed",
        f"trainer.critic.export_path={exported}",
    )
    assert more.series("step") == [1, 2, 3]
    assert more.series("critic/loss")[:2] == losses
    assert AutoConfig.from_pretrained(exported).architectures == ["LlamaForSequenceClassification"]


@pytest.mark.parametrize(
    "plan", [pytest.param("one_step_off", marks=pytest.mark.matrix), "fully_async"]
)
def test_a_plan_that_overlaps_trains_both(plan: str, train: Train) -> None:
    run = train(
        *PPO,
        f"trainer.plan={plan}",
        "trainer.max_training_steps=3",
        "trainer.critic.warmup_steps=1",
    )
    assert all(norm > 0 for norm in run.series("critic/grad_norm"))
    assert ["policy/grad_norm" in row for row in run.metrics] == [False, True, True]
    assert max(run.series("staleness/max")) >= 1
