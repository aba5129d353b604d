"""Log-probabilities from logits of which each rank of the tensor axis has a part of the vocabulary.

Invariant: no rank holds the whole vocabulary, unless the distribution has filters, which must look at all of it: then
the logits are gathered, as many as one rank without tensor parallelism would hold. What comes out is the same on every
rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh

from skyasync.workers.parallel.collectives import summed


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part: ``size`` tokens from ``first`` on, of ``ranks`` times as many."""

    group: dist.ProcessGroup
    ranks: int
    first: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh, vocabulary: int) -> Vocabulary:
        size = vocabulary // mesh.size()
        return cls(mesh.get_group(), mesh.size(), size * mesh.get_local_rank(), size)

    def scores(
        self, logits: Tensor, targets: Tensor, *, entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of the targets, and entropy if asked, ``[n]``; ``logits``: ``[n, size]``, this rank's."""
        most = logits.detach().amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        own = targets - self.first
        others = (own < 0) | (own >= self.size)
        chosen = logits.gather(1, own.masked_fill(others, 0)[:, None]).squeeze(1).masked_fill(others, 0.0)
        powers = (logits - most[:, None]).exp()
        total, target = summed(torch.stack([powers.sum(-1), chosen]), self.group)
        normalizer = most + total.log()
        logprobs = target - normalizer
        if not entropy:
            return logprobs, None
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            mean = summed((powers * logits).sum(-1), self.group) / total
            return logprobs, normalizer - mean

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
