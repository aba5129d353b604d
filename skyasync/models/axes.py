"""How the ranks of a model divide the work: which of them have rows of their own, and which share rows.

Invariant: rows are divided among the data axis alone; the ranks of one place on it, which are neighbours, get the same
rows and give the same answers. Nothing here imports torch.

    data 2 x context 1 x tensor 2:   rank 0 and 1 share the first half of the rows, rank 2 and 3 the second
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """Sizes of the axes; their product is the number of ranks. The last one varies fastest."""

    data: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def sharing(self) -> int:
        """Ranks that have the same rows."""
        return self.context * self.tensor

    @property
    def ranks(self) -> int:
        return self.data * self.sharing

    def rows_of(self, rank: int) -> int:
        """The place on the data axis."""
        return rank // self.sharing

    @classmethod
    def dividing(cls, ranks: int, context: int = 1, tensor: int = 1) -> Axes:
        """All of ``ranks`` that the other axes leave are the data axis."""
        axes = cls(ranks // (context * tensor), context, tensor)
        if axes.ranks != ranks:
            raise ValueError(f"{ranks} ranks are no multiple of context {context} times tensor {tensor}")
        return axes
