"""Log-probabilities from logits that the ranks of the tensor dimension divide by vocabulary.

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
    """This rank's part: ``size`` tokens from ``start`` on, of ``ranks`` times as many."""

    group: dist.ProcessGroup
    ranks: int
    start: int
    size: int

    def scores(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute log-probabilities of the targets ``[n, m]``, and entropy ``[n]`` if requested.

        Args:
            logits: ``[n, size]``, this rank's.
            targets: int64 ``[n, m]``, in the whole vocabulary.
        """
        maximum = self._maximum(logits)  # [n]
        local_targets = targets - self.start  # [n, m]
        is_remote = (local_targets < 0) | (local_targets >= self.size)
        # Another rank's target reads entry 0 here and adds 0 to the sum over ranks.
        target_logits = logits.gather(1, local_targets.masked_fill(is_remote, 0))
        target_logits = target_logits.masked_fill(is_remote, 0.0)  # [n, m]
        powers = (logits - maximum[:, None]).exp()  # [n, size]
        partial_sums = torch.cat([powers.sum(-1, keepdim=True), target_logits], 1)
        sums = sum_over_group(partial_sums, self.group)  # [n, 1 + m], in one collective
        total = sums[:, 0]
        normalizer = maximum + total.log()  # [n]: log-sum-exp over the whole vocabulary
        logprobs = sums[:, 1:] - normalizer[:, None]  # [n, m]
        if not entropy:
            return logprobs, None
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            # H = log Z - E[logit]
            weighted_sum = sum_over_group((powers * logits).sum(-1), self.group)
            return logprobs, normalizer - weighted_sum / total

    def most_likely(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k most likely tokens and their log-probabilities, ``[n, k]``; no gradient."""
        maximum = self._maximum(logits)  # [n]
        total = sum_over_group((logits - maximum[:, None]).exp().sum(-1), self.group)  # [n]
        normalizer = maximum + total.log()
        # The k likeliest of all are among the k likeliest of each rank.
        local_values, local_tokens = logits.topk(min(k, self.size))
        values = self._all_gather(local_values)  # [n, ranks * k]
        tokens = self._all_gather(local_tokens + self.start)
        values, index = values.topk(min(k, values.shape[1]))
        return tokens.gather(1, index), values - normalizer[:, None]

    def _maximum(self, logits: Tensor) -> Tensor:
        """``[n]``, over all ranks; detached, since it cancels in every result."""
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group)
        return maximum

    def _all_gather(self, tensor: Tensor) -> Tensor:
        """``[n, m]`` of each rank as ``[n, ranks * m]``, in the order of the ranks."""
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def gathered(self, logits: Tensor) -> Tensor:
        """Gather ``[n, vocabulary]`` from all ranks' parts; differentiable."""
        full_logits: Tensor = _Gathered.apply(logits, self)
        return full_logits


class _Gathered(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, vocabulary: Vocabulary) -> Tensor:
        ctx.vocabulary = vocabulary  # type: ignore[attr-defined]
        return vocabulary._all_gather(logits)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        vocabulary: Vocabulary = ctx.vocabulary  # type: ignore[attr-defined]
        # All ranks compute the same from the gathered logits: their gradients are not summed.
        return gradients[0].narrow(1, vocabulary.start, vocabulary.size), None


class _SumOverGroup(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()  # all_reduce works in place
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every rank has the gradient of the same sum already.
        return gradients[0], None


class _SumOfGradients(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)  # type: ignore[attr-defined]
        return total, None


sum_over_group: Callable[[Tensor, dist.ProcessGroup], Tensor] = _SumOverGroup.apply
"""The sum over ranks; each rank's tensor gets the gradient of the sum."""

sum_gradients_over_group: Callable[[Tensor, dist.ProcessGroup], Tensor] = _SumOfGradients.apply
"""Identity on a tensor that all ranks have; the gradient is the sum of the ranks' gradients.

For tensors that each rank uses in its part of the work.
"""
