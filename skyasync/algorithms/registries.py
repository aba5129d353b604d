"""The five registries of the algorithms, and which module holds which name.

Invariant: importing this module imports no torch, so that a wrong name is refused at once. A test holds the
tables and the decorators in the modules equal.
"""

from __future__ import annotations

from skyasync.registry import Registry

_HERE = "skyasync.algorithms"

POLICY_LOSSES = Registry(
    "policy loss",
    {
        f"{_HERE}.losses.clipped": "ppo dual_clip decoupled_ppo sapo dppo importance_sampling",
        f"{_HERE}.losses.gradient": "vanilla tis cispo topr kimi15 rollout_is",
        f"{_HERE}.losses.sequence": "gspo gmpo vespo",
        f"{_HERE}.losses.selective": "clip_cov kl_cov m2po",
    },
)

ADVANTAGE_ESTIMATORS = Registry(
    "advantage estimator",
    {
        f"{_HERE}.advantages": (
            "grpo dr_grpo rloo maxrl normalized reinforce++ reinforce++_baseline gae opo gpg grpo_passk"
        )
    },
)

KL_ESTIMATORS = Registry("KL estimator", {f"{_HERE}.kl": "k1 k2 k3 abs k1_straight_through k3_straight_through"})

CORRECTIONS = Registry(
    "off-policy correction",
    {
        f"{_HERE}.corrections": (
            "auto none token_tis sequence_tis geometric_tis segment_tis icepop sequence_icepop sequence_mask_tis "
            "token_mask sequence_mask geometric_mask outlier_mask difference_mask kl_mask negative_mask"
        )
    },
)

LOSS_REDUCTIONS = Registry(
    "loss reduction",
    {
        f"{_HERE}.reductions": (
            "token_mean sequence_mean prompt_mean seq_mean_token_sum_norm sequence_token_sum token_sum"
        )
    },
)
