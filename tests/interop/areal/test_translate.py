"""AReaL's keys that decide together, as its actor reads them."""

import pytest

from skyasync.interop.recipe import SourceRecipe, flags
from skyasync.interop.translation import translated
from tests.interop.test_translate import A, of

pytestmark = pytest.mark.slow

REJECTION = "actor.rejection_sampling."
DECOUPLED = ("actor.use_decoupled_loss=true", "rollout.max_head_offpolicyness=2")


def areal(*words: str) -> dict[str, object]:
    return of(*words, system="areal")


def remarks(*words: str) -> str:
    return translated(SourceRecipe(flags(words)), "areal").partition("# What differs")[2]


@pytest.mark.parametrize(("words", "loss", "anchor", "correction"), [
    ((), "ppo", "behaviour", "none"),
    (("actor.recompute_logprob=true",), "ppo", "proximal", "none"),
    (DECOUPLED, "ppo", "proximal", "none"),
    ((*DECOUPLED, f"{REJECTION}upper=4.0"), "decoupled_ppo", "proximal", "none"),
    ((*DECOUPLED, f"{REJECTION}upper=4.0", f"{REJECTION}lower=0.25"), "ppo", "proximal", "icepop"),
    ((*DECOUPLED, f"{REJECTION}action=clamp"), "ppo", "proximal", "token_tis"),
    ((*DECOUPLED, f"{REJECTION}level=sequence"), "ppo", "proximal", "sequence_icepop"),
    ((*DECOUPLED, f"{REJECTION}level=sequence", f"{REJECTION}action=clamp"), "ppo", "proximal", "geometric_tis"),
    ((*DECOUPLED, f"{REJECTION}upper=4.0", "actor.c_clip=3.0"), "dual_clip", "proximal", "icepop"),
    ((*DECOUPLED, f"{REJECTION}upper=4.0", "actor.importance_sampling_level=sequence"), "gspo", "proximal", "icepop"),
    ((*DECOUPLED, "actor.behav_imp_weight_cap=3.0"), "decoupled_ppo", "proximal", "none"),
    (("actor.use_sapo_loss=true",), "sapo", "behaviour", "none"),
])  # fmt: skip
def test_only_rejection_sampling_weighs_stale_tokens(
    words: tuple[str, ...], loss: str, anchor: str, correction: str
) -> None:
    found = areal(*words)
    assert found.get(f"{A}policy_loss_type", "ppo") == loss
    assert found.get(f"{A}ratio_anchor", "proximal") == anchor
    assert found[f"{A}off_policy_correction"] == correction
    uncorrected = loss == "ppo" and anchor == "proximal" and correction == "none"
    stale = found.get("trainer.plan") == "fully_async"
    assert found.get("trainer.allow_uncorrected", False) is (uncorrected and stale)


def test_bounds_of_weights_are_those_of_the_rejection() -> None:
    usual = areal(*DECOUPLED, f"{REJECTION}metric=ratio")
    assert usual[f"{A}behave_imp_weight_cap"] == 5.0
    band = areal(*DECOUPLED, f"{REJECTION}upper=4.0", f"{REJECTION}lower=0.25")
    assert (band[f"{A}icepop_low"], band[f"{A}icepop_high"]) == (0.25, 4.0)
    sequences = areal(*DECOUPLED, f"{REJECTION}level=sequence", f"{REJECTION}upper=2.0")
    assert (sequences[f"{A}product_mask_high"], sequences[f"{A}extra.level"]) == (2.0, "geometric")


@pytest.mark.parametrize(("words", "mean", "deviation"), [
    (("actor.reward_norm.mean_level=group",), "group", "batch"),
    (("actor.reward_norm.std_level=group",), "batch", "group"),
    (("actor.reward_norm.mean_level=group", "actor.reward_norm.std_level=null"), "group", "none"),
    ((), "none", "none"),
])  # fmt: skip
def test_a_norm_s_level_that_is_left_out_is_the_batch(
    words: tuple[str, ...], mean: str, deviation: str
) -> None:
    found = areal("gconfig.n_samples=4", *words)
    assert found[f"{A}advantage_estimator"] == "normalized"
    norms = [found.get(f"{A}reward_norm_{end}", "group") for end in ("mean", "std")]
    assert norms == [mean, deviation]


def test_the_mean_of_the_others_goes_with_a_deviation() -> None:
    alone = areal("actor.reward_norm.mean_level=group", "actor.reward_norm.std_level=null",
                  "actor.reward_norm.mean_leave1out=true")  # fmt: skip
    assert alone[f"{A}advantage_estimator"] == "rloo"
    divided = areal("actor.reward_norm.mean_level=group", "actor.reward_norm.std_level=group",
                    "actor.reward_norm.mean_leave1out=true")  # fmt: skip
    assert divided[f"{A}advantage_estimator"] == "normalized"
    assert divided[f"{A}extra.leave_one_out"] is True


@pytest.mark.parametrize(("words", "whitened", "said"), [
    (("actor.adv_norm.mean_level=batch", "actor.adv_norm.std_level=batch"), True, False),
    (("actor.adv_norm.mean_level=batch",), True, False),
    (("actor.adv_norm.mean_level=batch", "actor.adv_norm.std_level=null"), False, True),
    (("actor.adv_norm.mean_level=group", "actor.adv_norm.std_level=group"), False, True),
    (("actor.adv_norm=null",), False, False),
])  # fmt: skip
def test_advantages_are_whitened_over_the_batch_or_it_is_said(
    words: tuple[str, ...], whitened: bool, said: bool
) -> None:
    assert areal(*words).get(f"{A}advantage_batch_normalize", False) is whitened
    assert ("advantages are whitened over the batch or not at all" in remarks(*words)) is said


def test_without_a_reference_there_is_no_penalty() -> None:
    found = areal("actor.kl_ctl=0.1", "actor.path=a/b")
    assert f"{A}use_kl_in_reward" not in found
    assert "there is no KL term" in remarks("actor.path=a/b")
    assert "there is no KL term" not in remarks("actor.kl_ctl=0.0")
    with_one = areal("actor.kl_ctl=0.1", "ref.path=a/b")
    assert (with_one[f"{A}use_kl_in_reward"], with_one[f"{A}kl_loss_coef"]) == (True, 0.1)


@pytest.mark.parametrize(("words", "minutes"), [
    (["recover.mode=disabled", "recover.freq_secs=3600"], None),
    (["recover.freq_secs=3600"], None),
    (["recover.mode=auto", "recover.freq_secs=3600"], 60),
    (["recover.mode=disabled", "recover.freq_secs=3600", "saver.freq_secs=1800"], 30),
])  # fmt: skip
def test_a_recovery_that_is_off_saves_nothing(words: list[str], minutes: float | None) -> None:
    assert areal(*words).get("trainer.ckpt_minutes") == minutes


def test_what_the_loader_adds_to_a_prompt_is_said() -> None:
    assert "\\boxed{}" in remarks("train_dataset.path=openai/gsm8k")
    assert "boxed" not in remarks("train_dataset.path=acme/sums")


def test_a_prompt_without_a_bound_may_fill_what_a_response_leaves() -> None:
    found = areal("gconfig.max_new_tokens=1000", "vllm.max_model_len=4096")
    assert found["trainer.max_prompt_length"] == 3096
    bounded = areal(
        "gconfig.max_new_tokens=1000", "vllm.max_model_len=4096", "train_dataset.max_length=400"
    )
    assert bounded["trainer.max_prompt_length"] == 400


def test_the_temperature_of_sampling_is_the_sampler_s() -> None:
    words = ("gconfig.temperature=0.6", "actor.temperature=1.0")
    assert areal(*words)["generator.sampling_params.temperature"] == 0.6
    assert "there at actor.temperature=1.0" in remarks(*words)
    assert "actor.temperature" not in remarks("gconfig.temperature=0.6", "actor.temperature=0.6")


def test_evaluation_samples_as_training_unless_it_says_how() -> None:
    samples, group = "generator.eval_n_samples_per_prompt", "generator.eval_sampling_params."
    usual = areal("gconfig.n_samples=4", "gconfig.max_new_tokens=700")
    assert (usual[samples], usual[f"{group}temperature"]) == (4, None)
    named = areal("gconfig.n_samples=4", "gconfig.max_new_tokens=700", "eval_gconfig.top_p=0.9")
    assert (named.get(samples, 1), named[f"{group}temperature"]) == (1, 1.0)
    assert named[f"{group}max_generate_length"] == 16384
