"""OpenRLHF's keys that decide together, as its trainer reads them."""

import pytest

from skyasync.interop.recipe import SourceRecipe, flags
from skyasync.interop.translation import translated
from tests.interop.test_translate import A, of

pytestmark = pytest.mark.slow

GROUPS = ("--rollout.n_samples_per_prompt", "8", "--rollout.batch_size", "16")


def openrlhf(*words: str) -> dict[str, object]:
    return of(*words, system="openrlhf")


def test_gspo_with_a_correction_takes_its_ratio_to_the_engine_and_no_weight() -> None:
    words = (
        *GROUPS,
        "--actor.policy_loss_type",
        "gspo",
        "--algo.advantage.estimator",
        "group_norm",
    )
    plain = openrlhf(*words)
    assert (plain[f"{A}off_policy_correction"], plain.get(f"{A}ratio_anchor")) == ("none", None)
    corrected = openrlhf(*words, "--algo.advantage.is_correction_enable")
    assert (corrected[f"{A}off_policy_correction"], corrected[f"{A}ratio_anchor"]) == (
        "none",
        "behaviour",
    )
    assert f"{A}token_tis_ratio_clip_high" not in corrected
    assert corrected[f"{A}loss_reduction"] == "sequence_mean"


def test_the_weight_of_a_masked_sequence_is_not_truncated() -> None:
    found = openrlhf(
        "--algo.advantage.is_correction_enable",
        "--algo.advantage.is_correction_type",
        "seq-mask-tis",
    )
    assert found[f"{A}off_policy_correction"] == "sequence_mask_tis"
    assert (found[f"{A}geo_mask_low"], found[f"{A}geo_mask_high"]) == (0.5, 5.0)
    assert found[f"{A}token_tis_ratio_clip_high"] > 2.72**20


@pytest.mark.parametrize(
    ("estimator", "scaled"), [("reinforce_baseline", False), ("reinforce", False)]
)
def test_advantages_without_a_deviation_are_centred_alone(estimator: str, scaled: bool) -> None:
    found = openrlhf(
        *GROUPS, "--algo.advantage.estimator", estimator, "--algo.advantage.no_std_norm"
    )
    assert found[f"{A}extra.scale"] is scaled


def test_a_group_s_deviation_divides_whatever_no_std_norm_says() -> None:
    words = (*GROUPS, "--algo.advantage.estimator", "group_norm", "--algo.advantage.no_std_norm")
    found = openrlhf(*words)
    assert f"{A}grpo_norm_by_std" not in found and f"{A}extra.scale" not in found
    assert "#   algo.advantage.no_std_norm=true: " in translated(
        SourceRecipe(flags(words)), "openrlhf"
    )


@pytest.mark.parametrize(("words", "steps"), [
    (["--critic.freezing_steps", "10"], 11), (["--freezing_actor_steps", "10"], 10), ([], None),
])  # fmt: skip
def test_steps_without_the_policy_are_counted_as_there(words: list[str], steps: int | None) -> None:
    assert openrlhf(*words).get("trainer.critic.warmup_steps") == steps


@pytest.mark.parametrize(("words", "end"), [(["--rollout.max_new_tokens", "300"], 300), ([], 2048)])
def test_the_penalty_for_long_responses_is_complete_at_what_bounds_them(
    words: list[str], end: int
) -> None:
    found = openrlhf("--reward.overlong_buffer_len", "64", *words)
    assert found[f"{A}overlong_buffer.max_len"] == end


@pytest.mark.parametrize(
    ("estimator", "said"), [("group_norm", True), ("reinforce", False), ("gae", False)]
)
def test_a_penalty_in_the_reward_that_a_group_is_compared_by_is_said(
    estimator: str, said: bool
) -> None:
    text = translated(
        SourceRecipe(flags([*GROUPS, "--algo.advantage.estimator", estimator])), "openrlhf"
    )
    assert ("behind that comparison" in text) is said
