"""The proximal log-probabilities without a forward pass: interpolated between behaviour and current policy.

Invariant: tokens of the newest version (one behind the version being trained) get the behaviour policy itself; the
older a token, the closer its proximal policy is to the current one. Detached.
"""

from __future__ import annotations

import torch
from torch import Tensor


def approximate_proximal(current: Tensor, behaviour: Tensor, versions: Tensor, current_version: int, *,
                         method: str = "loglinear") -> Tensor:  # fmt: skip
    """Log-probabilities ``[batch, length]`` of the policy just before this update, from those of the two ends.

    With ``alpha = (v_prox - v) / (current_version - v)`` in [0, 1] and ``v_prox = current_version - 1``, "loglinear" is
    ``behaviour + alpha (current - behaviour)``, "linear" interpolates the probabilities, "rollout" is ``behaviour``.

    Args:
        versions: int ``[batch, length]``, the policy version of each token; negative (prompt) gives alpha 0.
        current_version: the version that this update makes.

    Source: AReaL ``prox_logp_method``.
    """
    age = (current_version - versions).to(current.dtype)
    alpha = torch.where((age > 0) & (versions >= 0), (age - 1) / age.clamp(min=1), 0).clamp(0, 1)
    current, behaviour = current.detach(), behaviour.detach()
    if method == "loglinear":
        return behaviour + alpha * (current - behaviour)
    if method == "linear":
        return ((1 - alpha) * behaviour.exp() + alpha * current.exp() + 1e-10).log()
    if method == "rollout":
        return behaviour
    raise ValueError(f"unknown method {method!r}: loglinear, linear or rollout")
