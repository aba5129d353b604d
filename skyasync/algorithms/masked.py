"""Arithmetic on ``[batch, length]`` tensors where only the tokens of a mask count.

Invariant: what stands outside the mask, garbage and NaN included, never reaches a result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

# exp(20) = 5e8: far beyond every clip range, and still finite when multiplied.
EXPONENT_BOUND = 20.0


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of ``mask``, a scalar; 0 without tokens."""
    total = torch.where(mask, values, 0).sum()  # not a product: 0 * NaN is NaN
    return total / mask.sum().clamp(min=1)


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Each row's sum over its mask, ``[batch, 1]``."""
    return torch.where(mask, values, 0).sum(1, keepdim=True)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Each row's mean over its mask, ``[batch, 1]``; 0 for a row without tokens."""
    return row_sum(values, mask) / mask.sum(1, keepdim=True).clamp(min=1)


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``log(p / q)`` per token, bounded to ±20 (gradient 0 beyond): its exponential is finite."""
    # Not clamp(): hardtanh is the same, with one kernel in the backward pass in place of four.
    return torch.nn.functional.hardtanh(numerator - denominator, -EXPONENT_BOUND, EXPONENT_BOUND)


def by_sign(condition: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    """``positive`` where the condition holds, else ``negative``, in the dtype of ``like``."""
    # Of two Python numbers ``where`` would give float32.
    return torch.where(condition, like.new_full((), positive), like.new_full((), negative))


def segment_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each contiguous run of mask tokens, for each of its tokens; 0 outside the mask.

    No gradient. The positions where the mask changes are few: a scatter over all tokens would cost
    more.
    """
    rows, length = mask.shape
    width = length + 1  # a column of padding keeps the runs of neighbouring rows apart
    padded_mask = torch.nn.functional.pad(mask, (1, 1))  # [rows, length + 2]
    is_edge = padded_mask[:, 1:] != padded_mask[:, :-1]  # [rows, width]
    edges = is_edge.flatten().nonzero().squeeze(1)
    # The flat batch is gap, run, gap, run, ..., gap; a gap holds zeros.
    begin = edges.new_zeros(1)
    end = edges.new_full((1,), rows * width)
    lengths = torch.diff(edges, prepend=begin, append=end)  # [segments]
    flat = torch.nn.functional.pad(torch.where(mask, values.detach(), 0), (0, 1)).flatten()
    means = torch.segment_reduce(flat, "sum", lengths=lengths) / lengths.clamp(min=1)
    # With the output's size the CPU need not wait for a GPU to count.
    of_tokens = means.repeat_interleave(lengths, output_size=rows * width)
    return of_tokens.view(rows, width)[:, :length]


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
    # [batch, length], 0 outside the mask
    deviations = torch.where(mask, exact - masked_mean(exact, mask), 0)
    if not scale:
        return deviations.to(values.dtype)
    count = mask.sum()
    variance = deviations.square().sum() / (count - int(unbiased)).clamp(min=1)
    if eps_on == "deviation":
        deviation = variance.sqrt() + eps
    else:
        deviation = (variance + eps).sqrt()
    return (deviations / deviation).to(values.dtype)


class JoinedRows:
    """Trajectories of several sequences as one sample each, their rows one after another.

    ``split(join(x))`` is ``x``. What is computed on joined tensors sees a trajectory as one row, in
    the order of its rows: it has one score, one length, and counts once.

    Args:
        trajectory_ids: int64 ``[batch]``; rows that share one are a trajectory's.
    """

    def __init__(self, trajectory_ids: Tensor) -> None:
        unique, self._sample = torch.unique(trajectory_ids, return_inverse=True)
        self._samples = len(unique)
        same_trajectory = self._sample[:, None] == self._sample[None, :]  # [batch, batch]
        # [batch]: how many rows of the trajectory come before
        self._position = same_trajectory.tril(-1).sum(1)
        self._max_rows = 1
        if len(trajectory_ids):
            self._max_rows = int(self._position.max()) + 1

    def join(self, values: Tensor) -> Tensor:
        """Join ``[batch, length]`` to ``[trajectories, most rows of one * length]``.

        Trajectories with fewer rows are padded with zero rows.
        """
        result = values.new_zeros(self._samples, self._max_rows, values.shape[1])
        result[self._sample, self._position] = values
        return result.flatten(1)

    def split(self, joined_rows: Tensor) -> Tensor:
        """Undo ``join``."""
        rows = joined_rows.unflatten(1, (self._max_rows, -1))  # [trajectories, rows, length]
        return rows[self._sample, self._position]

    def first(self, values: Tensor) -> Tensor:
        """Reduce ``[batch]``, equal within a trajectory, to ``[trajectories]``."""
        is_first = self._position == 0  # [batch]
        result = values.new_zeros(self._samples)
        result[self._sample[is_first]] = values[is_first]
        return result
