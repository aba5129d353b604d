"""A model that answers one question: what the rest of an episode is worth, before each loss token.

Invariant: entry t of a row is read off the state that predicts token t, so it knows nothing of that token. The head is
applied in float32 at least, whatever the weights' dtype.
"""

from __future__ import annotations

from torch import Tensor, nn

from skyasync.workers.model import Wrapped, linear_values
from skyasync.workers.packing import Layout

SCORE_LAYER = "score"
"""The head's name in the library's classes for sequence classification."""


class TokenValues(Wrapped):
    """The wrapped model as a function from a :class:`Layout` to per-token values.

    Args:
        model: one of transformers' for sequence classification with one label.
    """

    def forward(self, layout: Layout) -> Tensor:
        """``[rows, length]``: 0 where there is no loss token."""
        own = self.own(layout)
        head = self.model.get_submodule(SCORE_LAYER)
        assert isinstance(head, nn.Linear)
        return self.rows(linear_values(head, self.hidden(own)), own)
