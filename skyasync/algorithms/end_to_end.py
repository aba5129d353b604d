"""Trajectories of several sequences as one sample each.

Invariant: ``split(join(x))`` is ``x``. What is computed on joined tensors sees a trajectory's rows end to end, in their
order, as if they were one: it has one score, one length, and counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyasync.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class JoinedRows:
    """Rows of one trajectory, laid end to end.

    Args:
        trajectory_ids: int64 ``[batch]``; rows that share one are a trajectory's.
    """

    def __init__(self, trajectory_ids: Tensor) -> None:
        unique, self._sample = torch.unique(trajectory_ids, return_inverse=True)
        self._samples = len(unique)
        same = self._sample[:, None] == self._sample[None, :]
        self._place = same.tril(-1).sum(1)  # how many rows of the trajectory come before
        self._most = int(self._place.max()) + 1 if len(trajectory_ids) else 1

    def join(self, values: Tensor) -> Tensor:
        """``[batch, length]`` as ``[trajectories, most rows of one * length]``, zero where there is no row."""
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
