"""SkyRL's keys that decide together, as its trainer reads them."""

import pytest

from skyasync.interop.recipe import SourceRecipe, flags
from skyasync.interop.translation import translated
from tests.interop.test_translate import A, of

pytestmark = pytest.mark.slow


def skyrl(*words: str) -> dict[str, object]:
    return of(*words, system="skyrl")


def text_of(*words: str) -> str:
    return translated(SourceRecipe(flags(words)), "skyrl")


def test_a_fully_asynchronous_run_has_its_staleness_and_its_workers() -> None:
    found = skyrl("trainer.fully_async.enabled=true")
    assert (found["trainer.max_staleness"], found["generator.max_concurrent_rollouts"]) == (4, 768)
    synchronous = skyrl("trainer.epochs=2")
    assert (
        "trainer.max_staleness" not in synchronous
        and "generator.max_concurrent_rollouts" not in synchronous
    )


@pytest.mark.parametrize(("estimator", "clamp"), [("k3", 10.0), ("k1", None), ("k2", None)])
def test_one_estimate_of_the_divergence_is_clamped(estimator: str, clamp: float | None) -> None:
    assert skyrl(f"{A}kl_estimator_type={estimator}").get(f"{A}kl_clamp") == clamp
    assert f"{A}kl_clamp" not in skyrl(f"{A}use_kl_loss=false")


def test_how_the_penalty_is_reduced_is_said() -> None:
    assert "the mean over responses of each response's mean" in text_of("trainer.epochs=1")
    assert "# What differs" not in text_of(f"{A}loss_reduction=sequence_mean")
    assert "there of each micro-batch's mean" in text_of(f"{A}loss_reduction=token_mean_legacy")


def test_a_critic_with_batches_of_its_own_is_said() -> None:
    usual = (f"{A}advantage_estimator=gae", "trainer.critic_mini_batch_size=256")
    assert "the critic is updated with" not in text_of(*usual)
    assert "there with 256 prompts" in text_of(*usual, "trainer.policy_mini_batch_size=64")


def test_adapters_stay_and_stages_go_where_both_cannot_be() -> None:
    found = skyrl("trainer.policy.model.lora.rank=32", "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
                  "trainer.placement.policy_num_gpus_per_node=4")  # fmt: skip
    assert found["trainer.policy.lora.rank"] == 32
    assert "trainer.parallel.pipeline" not in found
