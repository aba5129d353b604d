"""SkyRL's keys that depend on each other."""

from __future__ import annotations

import re

from skyasync.config.values import Value
from skyasync.interop.conversion import Conversion
from skyasync.interop.draft import ESTIMATOR, KL_COEFFICIENT, MINI, PLAN, REDUCTION, A, Draft

CONVERSIONS: dict[str, Conversion] = {}
_MASKS = f"{A}off_policy_masks"


def finish(draft: Draft) -> None:
    """Masks that are on where a threshold is given, evaluation, the plan of the program, rewards of
    environments."""
    masks = draft.value(_MASKS)
    chosen: list[Value] = (
        [masks] if isinstance(masks, str) else list(masks) if isinstance(masks, list) else []
    )
    for mask, prefix in (("outlier_mask", "outlier_token_is"), ("token_mask", "token_mask_is")):
        if any(f"{A}{prefix}_threshold_{end}" in draft.settings for end in ("low", "high")):
            chosen.append(mask)
    if chosen:
        draft.put(_MASKS, chosen, *draft.origin(_MASKS))
    evaluation = "generator.eval_sampling_params."
    if not any(
        name.startswith(evaluation) for name in draft.source_keys
    ):  # greedy there, with training's length
        draft.settings.pop(f"{evaluation}max_generate_length", None)
    elif (
        f"{evaluation}temperature" not in draft.source_keys
    ):  # a group that is given has the usual defaults
        draft.put(f"{evaluation}temperature", 1.0, f"{evaluation}temperature")
    if PLAN not in draft.settings:
        if "fully_async" in draft.recipe.command:
            draft.put(PLAN, "fully_async")
        elif re.search(r"\.main_async\b|async\.main", draft.recipe.command):
            draft.put(PLAN, "one_step_off")
    if draft.value("environment.env_class") == "reward":
        draft.put("environment.reward_funcs", ["gsm8k"], "environment.env_class")
        draft.put("environment.env_class_from_rows", False)  # SkyRL's data name gsm8k in each row
    if not draft.value(f"{A}use_kl_loss") and not draft.value(f"{A}use_kl_in_reward"):
        draft.drop(KL_COEFFICIENT, "there is no KL term")
        draft.drop(f"{A}kl_estimator_type", "there is no KL term")
    _terms(draft)


def _terms(draft: Draft) -> None:
    """How the KL and the entropy term are computed, the critic's updates, the warm-up."""
    draft.set_kl_clamp("k3")
    draft.remark_filters()
    terms = [name for name in ("use_kl_loss", "use_entropy_loss") if draft.value(f"{A}{name}")]
    reduction = draft.value(REDUCTION)
    if terms and reduction != "sequence_mean":
        draft.remarks.append(
            f"{A}{' and '.join(terms)}: reduced by {reduction}, as the policy's loss is; "
            f"there the mean over responses of each response's mean"
        )
    if draft.source_value(REDUCTION) == "token_mean_legacy":
        draft.remarks.append(
            f"{A}loss_reduction: the mean over the tokens of all; there of each micro-batch's mean"
        )
    critic = draft.source_value("trainer.critic_mini_batch_size") or 256
    if draft.value(ESTIMATOR) == "gae" and critic != draft.source_value(
        "trainer.policy_mini_batch_size"
    ):
        draft.remarks.append(
            f"the critic is updated with {MINI}, as the policy is; there with {critic} prompts"
        )
    for section in ("policy", "critic"):
        draft.remark_warm_up(section)
