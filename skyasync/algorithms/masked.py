"""Arithmetic on ``[batch, length]`` tensors where only the tokens of a mask count.

Invariant: what stands outside the mask, garbage and NaN included, never reaches a result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

EXPONENT_BOUND = (
    20.0  # exp(20) = 5e8: far beyond every clip range, and still finite when multiplied
)


def masked_sum(
    values: Tensor, mask: Tensor, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    """Sum over the tokens of ``mask``: of all, or of each row with ``dim=1``."""
    values = torch.where(mask, values, 0)
    if dim is None:
        return values.sum()
    return values.sum(dim, keepdim=keepdim)


def masked_mean(
    values: Tensor, mask: Tensor, dim: int | None = None, keepdim: bool = False
) -> Tensor:
    """Mean over the tokens of ``mask``; 0 where there are none."""
    if dim is None:
        count = mask.sum()
    else:
        count = mask.sum(dim, keepdim=keepdim)
    return masked_sum(values, mask, dim, keepdim) / count.clamp(min=1)


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """``[batch, 1]``: each row's sum over its mask."""
    return masked_sum(values, mask, dim=1, keepdim=True)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """``[batch, 1]``: each row's mean over its mask; 0 for a row without tokens."""
    return masked_mean(values, mask, dim=1, keepdim=True)


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``log(p / q)`` per token, bounded to ±20 so that its exponential stays finite (gradient 0
    beyond)."""
    # Not clamp(): hardtanh is the same, with one kernel in the backward pass in place of four.
    return torch.nn.functional.hardtanh(numerator - denominator, -EXPONENT_BOUND, EXPONENT_BOUND)


def by_sign(condition: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    """``positive`` where the condition holds, else ``negative``, in the dtype of ``like``
    (``where`` gives float32)."""
    return torch.where(condition, like.new_full((), positive), like.new_full((), negative))


def segment_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each contiguous run of mask tokens, given to each of its tokens; 0 outside the
    mask. No gradient.

    Found by the places where the mask changes, of which there are few, so that a scatter over all
    tokens is spared.
    """
    rows, length = mask.shape
    width = length + 1  # a column of padding keeps the runs of neighbouring rows apart
    bounded = torch.nn.functional.pad(mask, (1, 1))
    edges = (bounded[:, 1:] != bounded[:, :-1]).flatten().nonzero().squeeze(1)
    # The flat batch is gap, run, gap, run, ..., gap; a gap holds zeros.
    lengths = torch.diff(
        edges, prepend=edges.new_zeros(1), append=edges.new_full((1,), rows * width)
    )
    flat = torch.nn.functional.pad(torch.where(mask, values.detach(), 0), (0, 1)).flatten()
    means = torch.segment_reduce(flat, "sum", lengths=lengths) / lengths.clamp(min=1)
    return means.repeat_interleave(lengths, output_size=rows * width).view(rows, width)[:, :length]


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    scale: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    eps_on: str = "variance",
) -> Tensor:
    """Subtract the mask's token mean and divide by its standard deviation; 0 outside the mask.

    Args:
        scale: False only subtracts the mean.
        unbiased: divide the sum of squares by n - 1 (verl, SkyRL, ROLL, AReaL); else by n
            (OpenRLHF).
        eps: keeps a constant input finite: added to the variance, or with ``eps_on="deviation"``
            (AReaL) to the standard deviation.
    """
    exact = values.double()  # equal values then differ from their mean by less than eps
    centred = torch.where(mask, exact - masked_mean(exact, mask), 0)
    if not scale:
        return centred.to(values.dtype)
    count = mask.sum()
    variance = centred.square().sum() / (count - int(unbiased)).clamp(min=1)
    if eps_on == "deviation":
        deviation = variance.sqrt() + eps
    else:
        deviation = (variance + eps).sqrt()
    return (centred / deviation).to(values.dtype)


class JoinedRows:
    """Trajectories of several sequences as one sample each: the rows of a trajectory one after
    another.

    ``split(join(x))`` is ``x``. What is computed on joined tensors sees a trajectory as one row, in
    the order of its rows: it has one score, one length, and counts once.

    Args:
        trajectory_ids: int64 ``[batch]``; rows that share one are a trajectory's.
    """

    def __init__(self, trajectory_ids: Tensor) -> None:
        unique, self._sample = torch.unique(trajectory_ids, return_inverse=True)
        self._samples = len(unique)
        same = self._sample[:, None] == self._sample[None, :]
        self._place = same.tril(-1).sum(1)  # how many rows of the trajectory come before
        if len(trajectory_ids):
            self._most = int(self._place.max()) + 1
        else:
            self._most = 1

    def join(self, values: Tensor) -> Tensor:
        """``[batch, length]`` as ``[trajectories, most rows of one * length]``, padded with zero
        rows."""
        joined = values.new_zeros(self._samples, self._most, values.shape[1])
        joined[self._sample, self._place] = values
        return joined.flatten(1)

    def split(self, joined: Tensor) -> Tensor:
        """Undo ``join``."""
        return joined.unflatten(1, (self._most, -1))[self._sample, self._place]

    def first(self, values: Tensor) -> Tensor:
        """``[batch]``, equal within a trajectory, as ``[trajectories]``."""
        firsts = self._place == 0
        result = values.new_zeros(self._samples)
        result[self._sample[firsts]] = values[firsts]
        return result
