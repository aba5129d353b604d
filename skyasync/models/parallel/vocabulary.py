"""Log-probabilities from logits of which each rank of the tensor dimension has a part of the
vocabulary.

Invariant: no rank holds the whole vocabulary, unless the distribution has filters, which need all
of it: then the logits are gathered, as many as one rank without tensor parallelism would hold. All
results are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part: ``size`` tokens from ``first`` on, of ``ranks`` times as many."""

    group: dist.ProcessGroup
    ranks: int
    first: int
    size: int

    def scores(
        self, logits: Tensor, targets: Tensor, *, entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the targets ``[n, m]``, and entropy ``[n]`` if requested.

        Args:
            logits: ``[n, size]``, this rank's.
        """
        most = self._most(logits)
        own = targets - self.first
        others = (own < 0) | (own >= self.size)
        chosen = logits.gather(1, own.masked_fill(others, 0)).masked_fill(others, 0.0)
        powers = (logits - most[:, None]).exp()
        sums = sum_over_group(torch.cat([powers.sum(-1, keepdim=True), chosen], 1), self.group)
        total = sums[:, 0]
        normalizer = most + total.log()
        logprobs = sums[:, 1:] - normalizer[:, None]
        if not entropy:
            return logprobs, None
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            mean = sum_over_group((powers * logits).sum(-1), self.group) / total
            return logprobs, normalizer - mean

    def most_likely(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most likely tokens and their log-probabilities, ``[n, k]``; no gradient."""
        most = self._most(logits)
        total = sum_over_group((logits - most[:, None]).exp().sum(-1), self.group)
        own, tokens = logits.topk(min(k, self.size))
        gathered = [[torch.empty_like(part) for _ in range(self.ranks)] for part in (own, tokens)]
        for parts, mine in zip(gathered, (own, tokens + self.first), strict=True):
            dist.all_gather(parts, mine.contiguous(), group=self.group)
        values, tokens = (torch.cat(parts, 1) for parts in gathered)
        values, index = values.topk(min(k, values.shape[1]))
        return tokens.gather(1, index), values - (most + total.log())[:, None]

    def _most(self, logits: Tensor) -> Tensor:
        most = logits.detach().amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return most

    def gathered(self, logits: Tensor) -> Tensor:
        """``[n, vocabulary]`` of all ranks' parts; differentiable."""
        whole: Tensor = _Gathered.apply(logits, self)
        return whole


class _Gathered(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, vocabulary: Vocabulary) -> Tensor:
        ctx.vocabulary = vocabulary  # type: ignore[attr-defined]
        parts = [torch.empty_like(logits) for _ in range(vocabulary.ranks)]
        dist.all_gather(parts, logits.contiguous(), group=vocabulary.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        own: Vocabulary = ctx.vocabulary  # type: ignore[attr-defined]
        return gradients[0].narrow(1, own.first, own.size), None


class _SumOverGroup(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = tensor.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumOfGradients(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].clone()
        dist.all_reduce(whole, group=ctx.group)  # type: ignore[attr-defined]
        return whole, None


sum_over_group: Callable[[Tensor, dist.ProcessGroup], Tensor] = _SumOverGroup.apply
"""The sum over ranks; each rank's tensor gets the gradient of the sum."""

sum_gradients_over_group: Callable[[Tensor, dist.ProcessGroup], Tensor] = _SumOfGradients.apply
"""The same tensor, which all ranks have and each uses in its part of the work: its gradient is the
ranks' sum."""
