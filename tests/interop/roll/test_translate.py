"""ROLL's keys that decide together, as its pipelines read them."""

import pytest

from skyasync.interop.recipe import SourceRecipe, flags
from skyasync.interop.translation import translated
from tests.interop.test_translate import A, of

pytestmark = pytest.mark.slow

TRAINING, STRATEGY = "actor_train.training_args.", "actor_train.strategy_args.strategy_config."
MINI = "trainer.policy_mini_batch_size"


def roll(*words: str) -> dict[str, object]:
    return of(*words, system="roll")


@pytest.mark.parametrize(("more", "prompts"), [
    ([], 32),
    ([f"{STRATEGY}tensor_model_parallel_size=2"], 16),
    ([f"{STRATEGY}context_parallel_size=2", f"{STRATEGY}pipeline_model_parallel_size=2"], 8),
    (["actor_train.model_args.ulysses_size=4"], 8),
])  # fmt: skip
def test_ranks_that_share_rows_do_not_multiply_a_batch(more: list[str], prompts: int) -> None:
    found = roll("num_return_sequences_in_group=4", "rollout_batch_size=128", "adv_estimator=grpo",
                 "actor_train.device_mapping=list(range(0,8))", f"{TRAINING}per_device_train_batch_size=2",
                 f"{TRAINING}gradient_accumulation_steps=8", *more)  # fmt: skip
    assert found[MINI] == prompts


def test_a_device_s_batch_and_its_accumulation_have_defaults() -> None:
    found = roll("num_return_sequences_in_group=4", "rollout_batch_size=128", "adv_estimator=grpo",
                 "actor_train.device_mapping=list(range(0,8))")  # fmt: skip
    assert found[MINI] == 8 * 1 * 8 // 4


def test_the_penalty_in_the_loss_is_k3_whatever_kl_penalty_says() -> None:
    found = roll("use_kl_loss=true", "kl_loss_coef=0.01", "kl_penalty=mse")
    assert f"{A}kl_estimator_type" not in found or found[f"{A}kl_estimator_type"] == "k3"
    assert found[f"{A}kl_clamp"] == 10.0
    in_reward = roll("add_token_level_kl=true", "kl_penalty=mse", "adv_estimator=gae")
    assert (in_reward[f"{A}kl_estimator_type"], in_reward.get(f"{A}kl_clamp", 0.0)) == ("k2", 0.0)


def test_a_second_clip_has_the_bound_that_the_first_makes() -> None:
    assert roll("dual_clip_loss=true", "pg_clip=0.3")[f"{A}clip_ratio_c"] == 1.6
    assert roll("dual_clip_loss=true", "pg_variant=ppo")[f"{A}policy_loss_type"] == "dual_clip"


def test_a_response_is_as_long_as_a_sequence_beyond_its_prompt() -> None:
    length = "generator.sampling_params.max_generate_length"
    engine = "actor_infer.generating_args.max_new_tokens=100"
    assert roll("prompt_length=512", "sequence_length=2048", engine)[length] == 1536
    assert roll("response_length=900", engine)[length] == 900
    assert roll("sequence_length=4096", engine, "train_env_manager.group_size=8")[length] == 100


def test_group_norms_of_grpo_are_fixed() -> None:
    found = roll("adv_estimator=grpo", "num_return_sequences_in_group=8", "norm_mean_type=batch")
    assert found[f"{A}advantage_estimator"] == "grpo"
    free = roll(
        "adv_estimator=reinforce", "num_return_sequences_in_group=8", "norm_mean_type=batch"
    )
    assert (free[f"{A}advantage_estimator"], free[f"{A}reward_norm_mean"]) == (
        "normalized",
        "batch",
    )


def test_validation_that_is_given_has_the_usual_sampling() -> None:
    found = roll("validation.generating_args.num_return_sequences=4")
    group = "generator.eval_sampling_params."
    assert [found[f"{group}{name}"] for name in ("temperature", "top_p", "top_k")] == [
        0.95,
        0.7,
        50,
    ]


def test_log_probabilities_of_other_policies_are_said() -> None:
    text = translated(SourceRecipe(flags(["actor_infer.generating_args.temperature=0.9"])), "roll")
    assert "there at 1" in text and "filter_logprobs=false" in text
    plain = ["temperature=1.0", "top_p=1.0", "top_k=-1"]
    plain_text = translated(
        SourceRecipe(flags([f"actor_infer.generating_args.{word}" for word in plain])), "roll"
    )
    assert "# What differs" not in plain_text


def test_bounds_of_a_truncated_weight_and_strengths_are_carried_over() -> None:
    worker = "actor_train.worker_cls=roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
    bounds = ("actor_train.tis_lower_bound=0.2", "actor_train.tis_upper_bound=1.5")
    found = roll(worker, "actor_train.pg_variant=tis", *bounds)
    assert (found[f"{A}tis_low"], found[f"{A}tis_high"]) == (0.2, 1.5)
    assert (
        roll(worker, "actor_train.pg_variant=kimi15", "actor_train.kimi15_tau=0.3")[
            f"{A}kimi15_tau"
        ]
        == 0.3
    )


def test_what_makes_a_sample_positive_is_said() -> None:
    text = translated(SourceRecipe(flags(["actor_train.pg_variant=topr"]), ""), "roll")
    assert "there a positive reward" in text


def test_a_note_about_what_differs_stands_at_its_setting() -> None:
    text = translated(SourceRecipe(flags(["difficulty_mask=true"]), ""), "roll")
    assert "type: mean  # difficulty_mask: there masked, here left out" in text
