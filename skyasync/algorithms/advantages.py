"""Advantage estimators: token rewards in, advantages and returns out.

Invariant: an estimator takes ``rewards [batch, length]`` (0 where none is earned),
``mask [batch, length]`` and ``group_ids [batch]``, and returns ``(advantages, returns)``, both
``[batch, length]`` and 0 outside the mask. A sample's score is the sum of its rewards wherever they
stand, so that a sample without loss tokens still counts in its group's baseline. A score of NaN is
no score: it enters no statistic and its own advantage is 0. Statistics are computed in float64
(``normalize``, ``Pools``); a group whose scores are all equal gets exactly 0 from every
group-relative estimator, whatever rounding and epsilon do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from skyasync.algorithms import ADVANTAGE_ESTIMATORS
from skyasync.algorithms.binding import bind, configured, setting
from skyasync.algorithms.masked import JoinedRows, whiten
from skyasync.algorithms.values import discounted_returns, gae
from skyasync.errors import UserError
from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

Estimate: TypeAlias = "tuple[Tensor, Tensor]"


def compute_advantages(
    cfg: object,
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    values: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Estimate:
    """Estimate, then whiten and clip, all as ``cfg`` says.

    Args:
        rewards: ``[batch, length]``, shaped (``shape_rewards``), KL penalty already subtracted if
            there is one.
        values: the critic's ``[batch, length]``; needed by "gae" only.
        trajectory_ids: ``[batch]``; rows that share one are laid end to end and estimated as one
            sample.
        lengths: ``[batch]``, sampled tokens, those outside the mask too; by default the mask's.

    Raises:
        ValueError: if the estimator needs values and there are none.
        UserError: if it returns something else than two tensors of the shape of the rewards.
    """
    if trajectory_ids is not None:
        # Every tensor becomes one row per trajectory; the results go back to the batch's rows.
        samples = JoinedRows(trajectory_ids)
        joined_values = None
        if values is not None:
            joined_values = samples.join(values)
        joined_lengths = None
        if lengths is not None:
            joined_lengths = samples.join(lengths[:, None]).sum(1)  # [trajectories]
        advantages, returns = compute_advantages(
            cfg,
            samples.join(rewards),
            samples.join(mask),
            samples.first(group_ids),
            joined_values,
            lengths=joined_lengths,
        )
        return samples.split(advantages), samples.split(returns)
    name = setting(cfg, "advantage_estimator", "grpo")
    estimator = bind(ADVANTAGE_ESTIMATORS[name], cfg)
    if "values" in estimator.inputs and values is None:
        raise ValueError(f"advantage estimator {name!r} needs a critic's values")
    tensors = {
        "rewards": rewards,
        "mask": mask,
        "group_ids": group_ids,
        "values": values,
        "lengths": lengths,
    }
    advantages, returns = _checked(estimator(tensors), rewards, name)
    # Clipping comes last, so that its limit is in the units that the loss sees.
    if setting(cfg, "advantage_batch_normalize", False):
        advantages = whiten(advantages, mask)
    clip = setting(cfg, "advantage_clip", 0.0)
    if clip:
        advantages = advantages.clamp(-clip, clip)
    return advantages, returns


def _checked(outcome: object, rewards: Tensor, name: str) -> Estimate:
    """The pair that an estimator returned.

    Without this check one tensor of two rows would be unpacked as a pair, and another shape would
    be broadcast.
    """
    pair = outcome if isinstance(outcome, tuple | list) else ()
    shapes = [tuple(tensor.shape) for tensor in pair if isinstance(tensor, torch.Tensor)]
    if shapes != [rewards.shape] * 2:
        result = f"tensors of shapes {shapes}" if pair else type(outcome).__name__
        raise UserError(
            f"advantage estimator {name!r} must return a pair (advantages, returns), each of the shape of the rewards, "
            f"{tuple(rewards.shape)}; it returned {result}"
        )
    return pair[0], pair[1]


def scores(rewards: Tensor) -> Tensor:
    """The sum of each sample's rewards, ``[batch]``, wherever in the row they are."""
    return rewards.sum(1)


def broadcast(advantages: Tensor, mask: Tensor) -> Estimate:
    """Give each sample's advantage ``[batch]`` to all its loss tokens; returns are the same."""
    tokens = torch.where(mask, advantages.unsqueeze(1), 0)  # [batch, length]
    return tokens, tokens


@ADVANTAGE_ESTIMATORS.register("grpo", group_relative=True)
@configured(norm_by_std="grpo_norm_by_std")
def grpo(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    norm_by_std: bool = True,
    eps: float = 1e-6,
    singleton_raw: bool = False,
) -> Estimate:
    """``(r - mean_group) / (std_group + eps)``.

    Without ``norm_by_std`` only the mean is subtracted. The standard deviation is unbiased; eps:
    OpenRLHF 1e-9, SkyRL, verl and ROLL 1e-6, AReaL 1e-5, TRL 1e-4. Source: Shao et al. 2024
    (DeepSeekMath).
    """
    std = "group" if norm_by_std else "none"
    return broadcast(
        normalize(scores(rewards), group_ids, std=std, eps=eps, singleton_raw=singleton_raw), mask
    )


@ADVANTAGE_ESTIMATORS.register("dr_grpo", group_relative=True)
def dr_grpo(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    singleton_raw: bool = False,
) -> Estimate:
    """``r - mean_group``: no division by the standard deviation.

    Source: Liu et al. 2025 (Dr.GRPO).
    """
    return broadcast(
        normalize(scores(rewards), group_ids, std="none", singleton_raw=singleton_raw), mask
    )


@ADVANTAGE_ESTIMATORS.register("rloo", group_relative=True)
def rloo(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    singleton_raw: bool = False,
) -> Estimate:
    """``r - mean of the others``. Source: Ahmadian et al. 2024 (RLOO)."""
    advantages = normalize(
        scores(rewards), group_ids, std="none", leave_one_out=True, singleton_raw=singleton_raw
    )
    return broadcast(advantages, mask)


@ADVANTAGE_ESTIMATORS.register("maxrl", group_relative=True)
def maxrl(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    eps: float = 1e-6,
    singleton_raw: bool = False,
) -> Estimate:
    """``(r - mean_group) / (mean_group + eps)``: harder prompts weigh more.

    For rewards that are not negative. Source: Tajwar et al. 2026 (maximum-likelihood RL).
    """
    total = scores(rewards)  # [batch]
    pool = Pools(group_ids, ~total.isnan())
    centred_scores = normalize(total, group_ids, std="none")
    group_mean = pool.mean(total.double())
    advantages = centred_scores / (group_mean + eps).to(total.dtype)
    singleton = total if singleton_raw else torch.zeros_like(total)
    return broadcast(torch.where(pool.sizes == 1, singleton, advantages), mask)


@ADVANTAGE_ESTIMATORS.register("normalized", group_relative=("mean",), whole_batch=("mean", "std"))
@configured(mean="reward_norm_mean", std="reward_norm_std")
def normalized(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    mean: str = "group",
    std: str = "group",
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-6,
    raw_std: bool = False,
) -> Estimate:
    """Mean and standard deviation each over the group, the batch or not at all.

    See ``normalize``. Source: AReaL ``reward_norm``, ROLL ``norm_mean_type`` and ``norm_std_type``.
    """
    advantages = normalize(
        scores(rewards),
        group_ids,
        mean=mean,
        std=std,
        leave_one_out=leave_one_out,
        unbiased=unbiased,
        eps=eps,
        raw_std=raw_std,
    )
    return broadcast(advantages, mask)


@ADVANTAGE_ESTIMATORS.register("reinforce++", whole_batch=True)
@configured(gamma="gamma")
def reinforce_pp(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    scale: bool = True,
    unbiased: bool = True,
) -> Estimate:
    """Discounted returns of the token rewards, whitened over the batch's tokens.

    Source: Hu 2025 (REINFORCE++).
    """
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return whiten(returns, mask, scale=scale, unbiased=unbiased), returns


@ADVANTAGE_ESTIMATORS.register("reinforce++_baseline", group_relative=True, whole_batch=True)
def reinforce_pp_baseline(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    scale: bool = True,
    unbiased: bool = True,
    singleton_raw: bool = False,
) -> Estimate:
    """``r - mean_group``, whitened over the batch's tokens.

    The scale is the batch's, so easy groups do not explode. Source: Hu 2025 (REINFORCE++, the
    variant with a group baseline).
    """
    centred_scores, _ = dr_grpo(rewards, mask, group_ids, singleton_raw=singleton_raw)
    advantages = whiten(centred_scores, mask, scale=scale, unbiased=unbiased)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("gae", whole_batch=("whitened",))
@configured(gamma="gamma", lambd="lambd", whitened="gae_whiten")
def generalized(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    whitened: bool = True,
) -> Estimate:
    """Generalised advantage estimation with a critic, whitened over the batch's tokens.

    See ``values.gae``.
    """
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lambd=lambd)
    if whitened:  # not the returns: the critic learns them in the units of the rewards
        advantages = whiten(advantages, mask)
    return advantages, returns


@ADVANTAGE_ESTIMATORS.register("opo", group_relative=True)
def opo(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    lengths: Tensor | None = None,
    *,
    singleton_raw: bool = False,
) -> Estimate:
    """``r - sum(length r) / sum(length)`` over the group: the optimal baseline.

    Source: Hao et al. 2025 (OPO).

    Args:
        lengths: ``[batch]``, sampled tokens; responses that are masked as truncated have theirs
            too.
    """
    total = scores(rewards)  # [batch]
    if lengths is None:
        lengths = mask.sum(1)
    weights = lengths.double()
    exact = total.double()
    pool = Pools(group_ids, ~total.isnan())
    baseline = pool.sum(weights * exact) / pool.sum(weights).clamp(min=1)
    # The weighted mean of equal scores may differ from them by rounding.
    baseline = torch.where(pool.constant(exact), exact, baseline)
    if singleton_raw:
        baseline = torch.where(pool.sizes == 1, 0, baseline)
    return broadcast(total - baseline.to(total.dtype), mask)


@ADVANTAGE_ESTIMATORS.register("gpg", group_relative=True, whole_batch=True)
def gpg(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    singleton_raw: bool = False,
) -> Estimate:
    """``alpha (r - mean_group)``, alpha = samples / samples with a reward.

    Source: Chu et al. 2025 (GPG).
    """
    total = scores(rewards)  # [batch]
    alpha = len(total) / total.count_nonzero().clamp(min=1)
    centred_scores = normalize(total, group_ids, std="none", singleton_raw=singleton_raw)
    return broadcast(alpha * centred_scores, mask)


@ADVANTAGE_ESTIMATORS.register("grpo_passk", group_relative=True)
def grpo_passk(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    eps: float = 1e-6,
    norm_by_std: bool = True,
) -> Estimate:
    """``(best - second best) / (std_group + eps)`` for a group's best sample, else 0.

    It optimises pass@k. Source: verl ``grpo_passk``. A group whose best is shared gets 0.
    """
    total = scores(rewards).double()  # [batch]
    pool = Pools(group_ids, ~total.isnan())
    best = pool.extreme(total, "amax")  # [batch]: of each sample's group
    is_best = total == best
    # -inf if all are best, which ``isfinite`` below excludes.
    second = Pools(group_ids, ~is_best).extreme(total, "amax")
    is_shared = pool.sum(is_best.double()) > 1
    gap = torch.where(is_best & ~is_shared & second.isfinite(), best - second, 0)
    if norm_by_std:
        gap = gap / (pool.deviation(total) + eps)
    return broadcast(gap.to(rewards.dtype), mask)


@ADVANTAGE_ESTIMATORS.register("none", rewarded=False)
def none(rewards: Tensor, mask: Tensor) -> Estimate:
    """0 everywhere: rewards are measured, and another signal, such as a teacher, is trained on."""
    return torch.zeros_like(rewards), torch.zeros_like(rewards)


def normalize(
    scores: Tensor,
    group_ids: Tensor,
    *,
    mean: str = "group",
    std: str = "group",
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-6,
    raw_std: bool = False,
    singleton_raw: bool = False,
) -> Tensor:
    """``(score - mean) / (std + eps)``, each over the group, the batch or not at all; ``[batch]``.

    Args:
        scores: ``[batch]``; NaN is a sample without a reward.
        mean, std: "group", "batch" or "none".
        leave_one_out: the mean of the *others* (RLOO).
        unbiased: the standard deviation divides by n - 1.
        raw_std: the spread of the scores (TRL, ROLL), not of the centred ones (AReaL). They differ
            for ``mean="group", std="batch"`` and with ``leave_one_out``. Either is taken about its
            own pool's mean.
        singleton_raw: a group of one keeps its score as its advantage (SkyRL, verl); otherwise it
            gets 0, having nothing to be compared with.
    """
    values = scores.double()  # [batch], as all tensors here
    has_score = ~values.isnan()
    values = torch.where(has_score, values, 0)
    groups = Pools(group_ids, has_score)
    pools = {"group": groups, "batch": Pools(torch.zeros_like(group_ids), has_score)}
    centred_values = values
    if mean != "none":
        pool = pools[mean]
        centred_values = values - pool.mean(values)
        if leave_one_out:
            # r - mean of the others = (r - mean) n / (n - 1)
            centred_values = centred_values * pool.sizes / (pool.sizes - 1).clamp(min=1)
        # A mean of equal scores may differ from them by rounding, which eps would not hide.
        centred_values = torch.where(pool.constant(values), 0, centred_values)
    result = centred_values
    if std != "none":
        pool = pools[std]
        deviation = pool.deviation(values if raw_std else centred_values, unbiased=unbiased)
        # One score has no deviation: it is divided by 1, not by eps.
        result = centred_values / (torch.where(pool.sizes > 1, deviation, 1.0) + eps)
    if mean == "group":
        singleton = torch.zeros_like(values)
        if singleton_raw:
            singleton = values / (1 + eps if std == "group" else 1)
        result = torch.where(groups.sizes == 1, singleton, result)
    return torch.where(has_score, result, 0).to(scores.dtype)


class Pools:
    """Statistics of the members of each pool that have a score.

    Every sample gets those of its pool: ``[batch]``, float64.
    """

    def __init__(self, ids: Tensor, has_score: Tensor) -> None:
        unique, self.index = torch.unique(ids, return_inverse=True)  # [pools], [batch]
        self.count = len(unique)
        self.has_score = has_score
        self.sizes = self.sum(torch.ones_like(has_score, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        totals = torch.zeros(self.count, dtype=torch.float64, device=values.device)  # [pools]
        totals = totals.index_add(0, self.index, torch.where(self.has_score, values, 0))
        return totals[self.index]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.sizes.clamp(min=1)

    def deviation(self, values: Tensor, *, unbiased: bool = True) -> Tensor:
        """The standard deviation of the sample's pool."""
        centred_values = values - self.mean(values)
        count = (self.sizes - int(unbiased)).clamp(min=1)
        return (self.sum(centred_values.square()) / count).sqrt()

    def constant(self, values: Tensor) -> Tensor:
        """Bool ``[batch]``: all values of the sample's pool are the same number."""
        # Not a deviation of 0, which rounding may miss.
        return self.extreme(values, "amax") == self.extreme(values, "amin")

    def extreme(self, values: Tensor, reduction: str) -> Tensor:
        """The largest ("amax") or smallest ("amin") value of the sample's pool."""
        fill = -torch.inf if reduction == "amax" else torch.inf
        extremes = torch.full((self.count,), fill, dtype=torch.float64, device=values.device)
        values = torch.where(self.has_score, values, fill)
        return extremes.scatter_reduce(0, self.index, values, reduction)[self.index]
