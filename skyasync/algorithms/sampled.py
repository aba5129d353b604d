"""The distribution that a token is sampled from: logits to the tokens that top-k, top-p and min-p
leave.

Invariant: the engine and the trainer call the same functions, so that the log-probabilities of both
are those of one distribution, and their ratio is 1 for equal weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

_NEVER = -1e9  # a logit whose probability is exactly 0, with a gradient that is not NaN


def likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Select the tokens that the filters leave of ``logits`` ``[rows, vocabulary]``; bool of the
    same shape.

    As in vLLM: min-p, then top-k, then top-p of the rest. Of tokens with equal logits the lower ids
    come first, as in vLLM's kernel for GPUs (``topk_topp_triton``): exactly k tokens remain, and
    the fewest whose probability reaches p. In bfloat16 such ties are common. Off is ``top_k <= 0``,
    ``top_p = 1``, ``min_p = 0`` (all ``[rows]``).
    """
    floor = logits.amax(dim=1) + min_p.log()
    candidates = logits >= floor[:, None]
    if not bool((top_k > 0).any()) and not bool((top_p < 1).any()):
        return candidates
    ordered, tokens = logits.sort(dim=1, descending=True, stable=True)  # [rows, vocabulary], both
    rank = torch.arange(ordered.shape[1], device=logits.device)[None, :]
    candidates = ordered >= floor[:, None]
    candidates &= (top_k[:, None] <= 0) | (rank < top_k[:, None])
    probs = ordered.masked_fill(~candidates, -torch.inf).softmax(dim=1)
    probability_before = probs.cumsum(dim=1) - probs
    candidates &= (top_p[:, None] >= 1) | (probability_before < top_p[:, None]) | (rank == 0)
    return torch.zeros_like(candidates).scatter(1, tokens, candidates)


def addends(
    vocabulary: int, logit_bias: Mapping[int, float], allowed_token_ids: Sequence[int]
) -> Tensor:
    """``[vocabulary]``: added to the logits first; -inf for tokens that are not allowed."""
    added = torch.zeros(vocabulary)
    if allowed_token_ids:
        added.fill_(-torch.inf)[torch.tensor(list(allowed_token_ids))] = 0.0
    if logit_bias:
        added[torch.tensor(list(logit_bias))] += torch.tensor(list(logit_bias.values()))
    return added


class Sampling(Protocol):
    """The fields that are read of ``sampling_params``."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logit_bias: dict[Any, Any]
    allowed_token_ids: list[int]


@dataclass(frozen=True)
class SampledDistribution:
    """The temperature and filters that turn a policy's logits into those that its tokens were
    sampled from.

    Penalties, bad words, ``min_tokens`` and grammars, which depend on the tokens before, are not
    among it.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, sampling: Sampling, *, filtered: bool = True) -> SampledDistribution:
        """From ``sampling_params``. Greedy sampling gives temperature 1 without filters."""
        if not filtered or not sampling.temperature:
            return cls(sampling.temperature or 1.0)
        bias = {int(token): float(value) for token, value in sampling.logit_bias.items()}
        allowed = tuple(sampling.allowed_token_ids)
        return cls(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, bias, allowed
        )

    @property
    def filters(self) -> bool:
        """Whether it is more than a temperature."""
        filters = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return filters or bool(self.logit_bias) or bool(self.allowed_token_ids)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Float logits ``[n, vocabulary]`` as they were sampled from, differentiable.

        Args:
            targets: ``[n]``, the tokens sampled. They stay possible also where rounding, or newer
                weights, put them outside the filters.
        """
        if self.logit_bias or self.allowed_token_ids:
            added = addends(logits.shape[1], self.logit_bias, self.allowed_token_ids).to(
                logits.device
            )
            logits = (logits + added.clamp(min=_NEVER)).clamp(min=_NEVER)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        else:
            logits = logits
        if not (self.top_k > 0 or self.top_p < 1 or self.min_p > 0):
            return logits
        rows = len(logits)
        top_k = torch.full((rows,), self.top_k, device=logits.device)
        top_p, min_p = (
            torch.full((rows,), value, device=logits.device) for value in (self.top_p, self.min_p)
        )
        with torch.no_grad():
            likely_tokens = likely(logits, top_k, top_p, min_p).scatter(1, targets[:, None], True)
        return logits.masked_fill(~likely_tokens, _NEVER)
