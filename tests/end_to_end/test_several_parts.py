"""Several ranks, several engines, a reference model: the same training in other processes."""

from __future__ import annotations

import pytest

from tests.end_to_end.runs import Train, Trained

pytestmark = pytest.mark.slow

GAP = 1e-4


@pytest.mark.parametrize("shared", [pytest.param("false", marks=pytest.mark.matrix), "true"])
def test_two_ranks_and_two_engines_train_like_one(
    shared: str, train: Train, sync_run: Trained
) -> None:
    run = train(
        f"trainer.placement.colocate_all={shared}",
        "trainer.max_training_steps=2",
        "trainer.placement.policy_num_gpus_per_node=2",
        "generator.num_inference_engines=2",
    )
    assert max(run.series("sync/logprob_gap")) <= GAP
    assert run.prompts == sync_run.prompts[:2]
    for name in ("policy/loss", "policy/grad_norm", "reward/mean"):
        assert run.series(name) == pytest.approx(sync_run.series(name)[:2], abs=1e-5)
    assert run.series("policy/tokens") == sync_run.series("policy/tokens")[:2]


@pytest.mark.matrix
@pytest.mark.parametrize("colocated", ["true", "false"])
def test_kl_to_the_reference_grows_from_zero(
    colocated: str, train: Train, models: dict[str, str]
) -> None:
    run = train(
        "trainer.plan=one_step_off", "trainer.max_training_steps=3", "trainer.algorithm.use_kl_loss=true",
        f"trainer.placement.colocate_policy_ref={colocated}", f"trainer.policy.model.path={models['untied']}",
    )  # fmt: skip
    first, *later = run.series("policy/kl_loss")
    assert abs(first) < 1e-9  # before the first update the policy is the reference
    assert min(later) > 1e-7
    assert max(run.series("sync/logprob_gap")) <= GAP
