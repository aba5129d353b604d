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
        samples = JoinedRows(trajectory_ids)
        whole = samples.join(values) if values is not None else None
        if lengths is not None:
            sampled = samples.join(lengths[:, None]).sum(1)
        else:
            sampled = None
        estimate = compute_advantages(
            cfg,
            samples.join(rewards),
            samples.join(mask),
            samples.first(group_ids),
            whole,
            lengths=sampled,
        )
        return samples.split(estimate[0]), samples.split(estimate[1])
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
    if setting(cfg, "advantage_batch_normalize", False):
        advantages = whiten(advantages, mask)
    clip = setting(cfg, "advantage_clip", 0.0)
    return (advantages.clamp(-clip, clip) if clip else advantages), returns


def _checked(outcome: object, rewards: Tensor, name: str) -> Estimate:
    """A pair; one tensor of two rows would be taken apart as one, and another shape would be
    broadcast."""
    pair = outcome if isinstance(outcome, tuple | list) else ()
    shapes = [tuple(each.shape) for each in pair if isinstance(each, torch.Tensor)]
    if shapes != [rewards.shape] * 2:
        if pair:
            result = f"tensors of shapes {shapes}"
        else:
            result = type(outcome).__name__
        raise UserError(
            f"advantage estimator {name!r} must return a pair (advantages, returns), each of the shape of the rewards, "
            f"{tuple(rewards.shape)}; it returned {result}"
        )
    return pair[0], pair[1]


def scores(rewards: Tensor) -> Tensor:
    """``[batch]``: the sum of each sample's rewards."""
    return rewards.sum(1)


def broadcast(advantages: Tensor, mask: Tensor) -> Estimate:
    """One number per sample to all its loss tokens; returns are the advantages."""
    tokens = torch.where(mask, advantages.unsqueeze(1), 0)
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
    """``(r - mean_group) / (std_group + eps)``; without ``norm_by_std`` only the mean is
    subtracted.

    The unbiased standard deviation; eps: OpenRLHF 1e-9, SkyRL, verl and ROLL 1e-6, AReaL 1e-5, TRL
    1e-4. Source: Shao et al. 2024 (DeepSeekMath).
    """
    std = "group" if norm_by_std else "none"
    return broadcast(
        normalize(scores(rewards), group_ids, std=std, eps=eps, singleton_raw=singleton_raw), mask
    )


@ADVANTAGE_ESTIMATORS.register("dr_grpo", group_relative=True)
def dr_grpo(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, singleton_raw: bool = False
) -> Estimate:
    """``r - mean_group``: no division by the standard deviation. Source: Liu et al. 2025
    (Dr.GRPO)."""
    return broadcast(
        normalize(scores(rewards), group_ids, std="none", singleton_raw=singleton_raw), mask
    )


@ADVANTAGE_ESTIMATORS.register("rloo", group_relative=True)
def rloo(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, singleton_raw: bool = False
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
    """``(r - mean_group) / (mean_group + eps)``: harder prompts weigh more. For rewards that are
    not negative.

    Source: Tajwar et al. 2026 (maximum-likelihood RL).
    """
    total = scores(rewards)
    pool = Pools(group_ids, ~total.isnan())
    centred = normalize(total, group_ids, std="none")
    advantages = centred / (pool.mean(total.double()) + eps).to(total.dtype)
    alone = total if singleton_raw else torch.zeros_like(total)
    return broadcast(torch.where(pool.sizes == 1, alone, advantages), mask)


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
    """Any cell of the matrix {group, batch, none} x {group, batch, none} of mean and standard
    deviation.

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
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, scale: bool = True, unbiased: bool = True
) -> Estimate:
    """Discounted returns of the token rewards, whitened over the batch's tokens. Source: Hu 2025
    (REINFORCE++)."""
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
    """``r - mean_group``, whitened over the batch's tokens: the scale is the batch's, so easy
    groups do not explode.

    Source: Hu 2025 (REINFORCE++, the variant with a group baseline).
    """
    centred, _ = dr_grpo(rewards, mask, group_ids, singleton_raw=singleton_raw)
    advantages = whiten(centred, mask, scale=scale, unbiased=unbiased)
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
    """Generalised advantage estimation with a critic, whitened over the batch's tokens. See
    ``values.gae``."""
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lambd=lambd)
    return (whiten(advantages, mask) if whitened else advantages), returns


@ADVANTAGE_ESTIMATORS.register("opo", group_relative=True)
def opo(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    lengths: Tensor | None = None,
    *,
    singleton_raw: bool = False,
) -> Estimate:
    """``r - sum(length r) / sum(length)`` over the group: the optimal baseline. Source: Hao et al.
    2025 (OPO).

    Args:
        lengths: ``[batch]``, sampled tokens; responses that are masked as truncated have theirs
            too.
    """
    total = scores(rewards)
    weights = (mask.sum(1) if lengths is None else lengths).double()
    pool = Pools(group_ids, ~total.isnan())
    baseline = pool.sum(weights * total.double()) / pool.sum(weights).clamp(min=1)
    baseline = torch.where(pool.constant(total.double()), total.double(), baseline)
    if singleton_raw:
        baseline = torch.where(pool.sizes == 1, 0, baseline)
    return broadcast(total - baseline.to(total.dtype), mask)


@ADVANTAGE_ESTIMATORS.register("gpg", group_relative=True, whole_batch=True)
def gpg(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, singleton_raw: bool = False
) -> Estimate:
    """``alpha (r - mean_group)``, alpha = samples / samples with a reward. Source: Chu et al. 2025
    (GPG)."""
    total = scores(rewards)
    alpha = len(total) / total.count_nonzero().clamp(min=1)
    return broadcast(
        alpha * normalize(total, group_ids, std="none", singleton_raw=singleton_raw), mask
    )


@ADVANTAGE_ESTIMATORS.register("grpo_passk", group_relative=True)
def grpo_passk(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, eps: float = 1e-6, norm_by_std: bool = True
) -> Estimate:
    """``(best - second best) / (std_group + eps)`` for a group's best sample, 0 for the others:
    optimises pass@k.

    Source: verl ``grpo_passk``. A group whose best is shared gets 0.
    """
    total = scores(rewards).double()
    pool = Pools(group_ids, ~total.isnan())
    best = pool.extreme(total, "amax")
    is_best = total == best
    second = Pools(group_ids, ~is_best).extreme(total, "amax")
    shared = pool.sum(is_best.double()) > 1
    gap = torch.where(is_best & ~shared & second.isfinite(), best - second, 0)
    if norm_by_std:
        gap = gap / (pool.deviation(total) + eps)
    return broadcast(gap.to(rewards.dtype), mask)


@ADVANTAGE_ESTIMATORS.register("none", rewarded=False)
def none(rewards: Tensor, mask: Tensor) -> Estimate:
    """0 everywhere: rewards are measured and not trained on (a teacher is)."""
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
    values = scores.double()
    known = ~values.isnan()
    values = torch.where(known, values, 0)
    groups = Pools(group_ids, known)
    pools = {"group": groups, "batch": Pools(torch.zeros_like(group_ids), known)}
    centred = values
    if mean != "none":
        pool = pools[mean]
        centred = values - pool.mean(values)
        if leave_one_out:
            centred = centred * pool.sizes / (pool.sizes - 1).clamp(min=1)
        centred = torch.where(pool.constant(values), 0, centred)
    result = centred
    if std != "none":
        pool = pools[std]
        deviation = pool.deviation(values if raw_std else centred, unbiased=unbiased)
        result = centred / (torch.where(pool.sizes > 1, deviation, 1.0) + eps)
    if mean == "group":
        if singleton_raw:
            alone = values / (1 + eps if std == "group" else 1)
        else:
            alone = torch.zeros_like(values)
        result = torch.where(groups.sizes == 1, alone, result)
    return torch.where(known, result, 0).to(scores.dtype)


class Pools:
    """Statistics of the known members of each pool, handed back to every sample (``[batch]``,
    float64)."""

    def __init__(self, ids: Tensor, known: Tensor) -> None:
        unique, self.index = torch.unique(ids, return_inverse=True)
        self.count = len(unique)
        self.known = known
        self.sizes = self.sum(torch.ones_like(known, dtype=torch.float64))

    def sum(self, values: Tensor) -> Tensor:
        totals = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return totals.index_add(0, self.index, torch.where(self.known, values, 0))[self.index]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.sizes.clamp(min=1)

    def deviation(self, values: Tensor, *, unbiased: bool = True) -> Tensor:
        """Standard deviation of the known values of the sample's pool."""
        centred = values - self.mean(values)
        return (self.sum(centred.square()) / (self.sizes - int(unbiased)).clamp(min=1)).sqrt()

    def constant(self, values: Tensor) -> Tensor:
        """Bool ``[batch]``: all known values of the sample's pool are the same number."""
        return self.extreme(values, "amax") == self.extreme(values, "amin")

    def extreme(self, values: Tensor, which: str) -> Tensor:
        """The largest ("amax") or smallest ("amin") known value of the sample's pool."""
        fill = -torch.inf if which == "amax" else torch.inf
        totals = torch.full((self.count,), fill, dtype=torch.float64, device=values.device)
        values = torch.where(self.known, values, fill)
        return totals.scatter_reduce(0, self.index, values, which)[self.index]
