"""SkyRL's keys that depend on each other."""

from __future__ import annotations

import re

from skyasync.config.values import Value
from skyasync.interop.conversion import Conversion
from skyasync.interop.draft import ESTIMATOR, KL_COEFFICIENT, MINI, PLAN, REDUCTION, Draft

CONVERSIONS: dict[str, Conversion] = {}


def finish(draft: Draft) -> None:
    """Apply the rules for keys that depend on each other."""
    _masks(draft)
    evaluation = "generator.eval_sampling_params."
    temperature = f"{evaluation}temperature"
    if not any(name.startswith(evaluation) for name in draft.source_keys):
        # By default SkyRL's evaluation is greedy, with the response length of training.
        draft.settings.pop(f"{evaluation}max_generate_length", None)
    elif temperature not in draft.source_keys:
        draft.put(temperature, 1.0, temperature)  # the default of a group that is written
    if PLAN not in draft.settings:
        if "fully_async" in draft.recipe.command:
            draft.put(PLAN, "fully_async")
        elif re.search(r"\.main_async\b|async\.main", draft.recipe.command):
            draft.put(PLAN, "one_step_off")
    if draft.value("environment.env_class") == "reward":
        draft.put("environment.reward_funcs", ["gsm8k"], "environment.env_class")
        draft.put("environment.env_class_from_rows", False)  # SkyRL's data name gsm8k in each row
    if not draft.value("trainer.algorithm.use_kl_loss") and not draft.value(
        "trainer.algorithm.use_kl_in_reward"
    ):
        draft.drop(KL_COEFFICIENT, "there is no KL term")
        draft.drop("trainer.algorithm.kl_estimator_type", "there is no KL term")
    _terms(draft)


def _masks(draft: Draft) -> None:
    """Add the masks that a threshold switches on there."""
    path = "trainer.algorithm.off_policy_masks"
    current = draft.value(path)
    masks: list[Value] = []
    if isinstance(current, list):
        masks += current
    elif isinstance(current, str):
        masks.append(current)
    for mask, prefix in (("outlier_mask", "outlier_token_is"), ("token_mask", "token_mask_is")):
        low = f"trainer.algorithm.{prefix}_threshold_low"
        high = f"trainer.algorithm.{prefix}_threshold_high"
        if low in draft.settings or high in draft.settings:
            masks.append(mask)
    if masks:
        draft.change(path, masks)


def _terms(draft: Draft) -> None:
    """The reduction of the KL and entropy terms, the critic's updates, the warm-up."""
    draft.set_kl_clamp("k3")
    draft.remark_filters()
    terms = [
        name
        for name in ("use_kl_loss", "use_entropy_loss")
        if draft.value(f"trainer.algorithm.{name}")
    ]
    reduction = draft.value(REDUCTION)
    if terms and reduction != "sequence_mean":
        draft.remarks.append(
            f"trainer.algorithm.{' and '.join(terms)}: reduced by {reduction}, as the policy's loss is; "
            f"there the mean over responses of each response's mean"
        )
    if draft.source_value(REDUCTION) == "token_mean_legacy":
        draft.remarks.append(
            f"{REDUCTION}: the mean over the tokens of all; there of each micro-batch's mean"
        )
    # SkyRL's default is 256 prompts.
    critic_prompts = draft.source_value("trainer.critic_mini_batch_size") or 256
    if draft.value(ESTIMATOR) == "gae" and critic_prompts != draft.source_value(MINI):
        draft.remarks.append(
            f"the critic is updated with {MINI}, as the policy is; there with {critic_prompts} prompts"
        )
    draft.remark_warm_up("policy")
    draft.remark_warm_up("critic")
