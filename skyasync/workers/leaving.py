"""The weights that leave a model, one after the other.

Invariant: names, dtypes and shapes of all are known before the first comes. All ranks go through them alike and to the
end, gathering each parameter when its turn has come, so that no rank needs memory for more than one that is whole (and
for what it is taken apart into).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from skyasync.weight_sync.kinds import Kinds
from skyasync.workers.file_names import Apart


class Leaving:
    """Whole tensors by name, in the order of ``kinds``; they may come in other dtypes than it says.

    Args:
        weights: shards, or what has a ``full_tensor`` of its own, by the names of the model's parameters.
        dtype: of numbers with a point.
        apart: how what is joined in the model is apart in files; None sends it as it is.
    """

    def __init__(self, weights: Mapping[str, Any], dtype: torch.dtype, apart: Apart | None = None) -> None:
        self._weights, self._dtype, self._apart = weights, dtype, apart
        self.kinds: Kinds = apart.kinds if apart else kinds_in(weights, dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._apart is None:
            yield from gathered(self._weights)
        elif self._apart.one_by_one:
            for name, whole in gathered(self._weights):
                yield from self._apart.of_one(name, whole)
        else:
            yield from self._apart.of_all({name: self._cast(whole) for name, whole in gathered(self._weights)})

    def _cast(self, whole: Tensor) -> Tensor:
        return (whole.to(self._dtype) if whole.is_floating_point() else whole).cpu().contiguous()

    def only_gather(self) -> None:
        """What a rank does that keeps nothing."""
        for _ in gathered(self._weights):
            pass


def kinds_in(weights: Mapping[str, Any], dtype: torch.dtype) -> Kinds:
    """Of whole weights in a dtype; those that are no numbers with a point stay what they are."""
    return {name: (dtype if w.dtype.is_floating_point else w.dtype, tuple(w.shape)) for name, w in weights.items()}


def gathered(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """One after the other, whole: all ranks go through it, and none needs memory for more than one."""
    for name, value in tensors.items():
        gather = getattr(value, "full_tensor", None)
        whole = gather() if gather else value
        yield name, (whole.numbers() if hasattr(whole, "numbers") else whole).detach()  # of codes what they stand for
