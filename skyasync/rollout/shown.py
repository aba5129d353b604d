"""A trajectory's tokens for people: what each says, which policy computed it, and what two policies thought of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from skyasync.arrays import Floats
from skyasync.rollout.types import Segment

MOST_TOKENS = 512  # of a sample, so that a run of long responses does not fill the disk
_DIGITS = 4

Decode = Callable[[list[int]], str]
Columns = dict[str, list[Any]]


def token_columns(
    segments: Sequence[Segment], decode: Decode, trained: Floats | None = None, *, most: int | None = MOST_TOKENS
) -> Columns:
    """Behind the prompt, one entry per token: ``text``, ``versions`` (-1 for what the environment said), ``logprobs``
    (null there) and, where the trainer has looked at the sequence, ``trainer_logprobs``.

    Args:
        trained: the trainer's, of the whole sequence.
        most: tokens that are shown; None shows all.
    """
    columns: Columns = {"text": [], "versions": [], "logprobs": []}
    found: list[float | None] = []
    place = len(segments[0].tokens) if segments else 0
    for segment in segments[1:]:
        room = None if most is None else most - len(columns["text"])
        tokens = segment.tokens[:room].tolist()
        action = segment.kind == "action"
        columns["text"] += [decode([token]) for token in tokens]
        columns["versions"] += segment.versions[:room].tolist() if action else [-1] * len(tokens)
        columns["logprobs"] += _rounded(segment.logprobs[:room]) if action else [None] * len(tokens)
        if trained is not None:
            theirs = trained[place : place + len(tokens)]
            found += _rounded(theirs) if action else [None] * len(tokens)
        place += len(segment.tokens)
    return columns if trained is None else {**columns, "trainer_logprobs": found}


def _rounded(values: Floats) -> list[float | None]:
    return [round(value, _DIGITS) if np.isfinite(value) else None for value in values.tolist()]
