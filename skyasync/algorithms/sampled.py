"""The distribution that a token is sampled from, after temperature, top-k, top-p and min-p.

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
    """Select the tokens that the filters leave; bool ``[rows, vocabulary]``, as ``logits``.

    As in vLLM: min-p, then top-k, then top-p of the rest. Of tokens with equal logits the lower ids
    come first, as in vLLM's kernel for GPUs (``topk_topp_triton``): exactly k tokens remain, and
    the fewest whose probability reaches p. In bfloat16 such ties are common. Off is ``top_k <= 0``,
    ``top_p = 1``, ``min_p = 0`` (all ``[rows]``).
    """
    floor = logits.amax(dim=1) + min_p.log()  # [rows]; -inf if min-p is off
    candidates = logits >= floor[:, None]
    if not bool((top_k > 0).any()) and not bool((top_p < 1).any()):
        return candidates
    # [rows, vocabulary] each; stable: of equal logits the lower ids come first.
    sorted_logits, tokens = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(sorted_logits.shape[1], device=logits.device)[None, :]
    candidates = sorted_logits >= floor[:, None]
    candidates &= (top_k[:, None] <= 0) | (rank < top_k[:, None])
    probs = sorted_logits.masked_fill(~candidates, -torch.inf).softmax(dim=1)
    probability_before = probs.cumsum(dim=1) - probs
    # Rank 0 stays even if top-p is 0; ``top_p >= 1`` because rounding may sum to more than 1.
    candidates &= (top_p[:, None] >= 1) | (probability_before < top_p[:, None]) | (rank == 0)
    # Back from the sorted order to the vocabulary's.
    return torch.zeros_like(candidates).scatter(1, tokens, candidates)


def addends(
    vocabulary: int,
    logit_bias: Mapping[int, float],
    allowed_token_ids: Sequence[int],
) -> Tensor:
    """The bias of logits, ``[vocabulary]``; -inf for tokens that are not allowed."""
    bias = torch.zeros(vocabulary)
    if allowed_token_ids:
        bias.fill_(-torch.inf)
        bias[torch.tensor(list(allowed_token_ids))] = 0.0
    if logit_bias:
        bias[torch.tensor(list(logit_bias))] += torch.tensor(list(logit_bias.values()))
    return bias


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
    """The temperature and filters by which a policy's tokens were sampled.

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
        """The distribution of ``sampling_params``.

        Greedy sampling gives temperature 1 without filters.
        """
        if not filtered or not sampling.temperature:
            return cls(sampling.temperature or 1.0)
        bias = {int(token): float(value) for token, value in sampling.logit_bias.items()}
        allowed_ids = tuple(sampling.allowed_token_ids)
        return cls(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, bias, allowed_ids
        )

    @property
    def filters(self) -> bool:
        """Whether it is more than a temperature."""
        return self._truncates or bool(self.logit_bias) or bool(self.allowed_token_ids)

    @property
    def _truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Float logits ``[n, vocabulary]`` as they were sampled from, differentiable.

        Args:
            targets: ``[n]``, the tokens sampled. They stay possible also where rounding, or newer
                weights, put them outside the filters.
        """
        if self.logit_bias or self.allowed_token_ids:
            bias = addends(logits.shape[1], self.logit_bias, self.allowed_token_ids)
            bias = bias.clamp(min=_NEVER).to(logits.device)  # [vocabulary]
            logits = (logits + bias).clamp(min=_NEVER)
        # After the bias and before the filters, as engines do.
        if self.temperature != 1.0:
            logits = logits / self.temperature
        if not self._truncates:
            return logits
        rows = (len(logits),)
        top_k = torch.full(rows, self.top_k, device=logits.device)
        top_p = torch.full(rows, self.top_p, device=logits.device)
        min_p = torch.full(rows, self.min_p, device=logits.device)
        # The choice of tokens has no gradient, the logits that stay have one.
        with torch.no_grad():
            likely_tokens = likely(logits, top_k, top_p, min_p)  # bool [n, vocabulary]
            likely_tokens = likely_tokens.scatter(1, targets[:, None], True)
        return logits.masked_fill(~likely_tokens, _NEVER)
