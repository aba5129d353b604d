"""What the trainer found of the sequences it trained: a sequence's tokens to their log-probabilities.

Invariant: a sequence is found by its tokens alone, so neither filters, nor micro-batches, nor the order of rows can
mix up two of them; equal ones have equal log-probabilities, being of one policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from skyasync.arrays import Floats, Ints, ints

if TYPE_CHECKING:
    from skyasync.models.batch import UpdateBatch


class TrainedRows:
    """The rows of what was trained in a step.

    Args:
        parts: as they were trained; of a row that was trained twice the first time counts.
    """

    def __init__(self, parts: Sequence[UpdateBatch] = ()) -> None:
        self._parts = [part for part in parts if part.proximal_logprobs is not None]
        self._rows: dict[int, dict[int, tuple[int, int]]] = {}  # by length, as far as somebody has asked: by digest

    def logprobs(self, tokens: Ints) -> Floats | None:
        """The proximal policy's, one per token (0 where it was not asked); None for a sequence that was not trained."""
        length = len(tokens)
        if length not in self._rows:
            self._rows[length] = dict(self._of_length(length))
        found = self._rows[length].get(_digest(tokens))
        if found is None:
            return None
        part, row = found
        values = self._parts[part].proximal_logprobs
        assert values is not None
        logprobs: Floats = values[row, :length].float().cpu().numpy()
        return logprobs

    def _of_length(self, length: int) -> list[tuple[int, tuple[int, int]]]:
        found = []
        for number in reversed(range(len(self._parts))):  # what is said last counts
            part = self._parts[number]
            for row in (part.attention_mask.sum(1) == length).nonzero().flatten().tolist():
                found.append((_digest(ints(part.tokens[row, :length].cpu().numpy())), (number, row)))
        return found


def _digest(tokens: Ints) -> int:
    return xxhash.xxh3_64_intdigest(tokens.tobytes())
