"""The losses of the Tinker API, as sums over tokens, for the policy's ranks.

Invariant: only ``token_losses`` defines a loss. Both the gradient and the loss in the answer come
from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from skyasync.models.backend import LOGPROBS, MODEL, LossFn, LossTerm, OutputRequest
from skyasync.models.batch import UpdateBatch


class LossInputs(NamedTuple):
    """The inputs of a loss besides ``target_tokens``, by the protocol's names.

    ``required`` and ``optional`` are values per token, ``settings`` have their defaults.
    """

    required: frozenset[str] = frozenset({"logprobs", "advantages"})
    optional: frozenset[str] = frozenset()
    settings: Mapping[str, float] = {}


#: Bounds of the ratio. They are settings, or inputs per token.
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": LossInputs(frozenset(), frozenset({"weights"})),
    "importance_sampling": LossInputs(),
    "ppo": LossInputs(optional=frozenset(_CLIP), settings=_CLIP),
    "cispo": LossInputs(optional=frozenset(_CLIP), settings=_CLIP),
    "dro": LossInputs(settings={"beta": 0.05}),
    "gspo": LossInputs(optional=frozenset({*_CLIP, "sequence_ratio_mask"}), settings=_CLIP),
}
"""The losses by name."""

NOT_SUPPORTED = {
    "stable_reinforce": "it needs what the service records while it samples, which the engines here do not",
    "custom": "losses are computed by the client here (forward_backward_custom with a function)",
}


@dataclass(kw_only=True)
class LossBatch(UpdateBatch):
    """The rows of one request. All tokens but a row's first are loss tokens.

    The tensors are ``[batch, length]``. ``ratio_mask`` has the tokens over which GSPO takes the
    ratio of a sequence.
    """

    loss_name: str
    beta: float
    clip_low: Tensor
    clip_high: Tensor
    ratio_mask: Tensor
    forward_only: bool


def token_losses(logprobs: Tensor, batch: LossBatch) -> Tensor:
    """The loss of each token, ``[batch, length]``; after a row's tokens it has no meaning.

    Args:
        logprobs: of the rows' tokens, by the model, ``[batch, length]``.
    """
    if batch.loss_name == "cross_entropy":
        return -logprobs * batch.loss_weights
    difference = logprobs - batch.behaviour_logprobs
    advantages = batch.advantages
    if batch.loss_name == "dro":
        return -(logprobs * advantages - 0.5 * batch.beta * difference.square())
    if batch.loss_name == "gspo":  # arXiv 2507.18071, its form per token
        mask = batch.ratio_mask
        tokens = mask.sum(1, keepdim=True).clamp(min=1)  # [batch, 1]
        mean = (difference.detach() * mask).sum(1, keepdim=True) / tokens
        # The value is the sequence's mean, the gradient the token's.
        difference = mean + logprobs - logprobs.detach()
    ratio = difference.exp()
    if batch.loss_name == "importance_sampling":
        return -ratio * advantages
    clipped = torch.minimum(torch.maximum(ratio, batch.clip_low), batch.clip_high)
    if batch.loss_name == "cispo":  # arXiv 2506.13585
        return -clipped.detach() * logprobs * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages)


class SummedLoss(LossFn):
    """``token_losses``, summed over the loss tokens."""

    def request(self, batch: UpdateBatch) -> OutputRequest:
        return OutputRequest(plain=True)

    def __call__(self, outputs: Mapping[str, Tensor], batch: UpdateBatch) -> dict[str, LossTerm]:
        assert isinstance(batch, LossBatch)
        losses = token_losses(outputs[LOGPROBS], batch).where(batch.loss_mask, 0.0)
        return {MODEL: LossTerm(losses.sum(), batch.loss_mask, {})}
