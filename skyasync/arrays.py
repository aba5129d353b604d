"""Arrays with one number per token: Python's work does not grow with the tokens.

Invariant: ids and versions are int32, log-probabilities float32 (which is what engines compute), so
nothing is lost between the engine and the loss. Arrays are replaced, never changed: several owners
may share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
#: ``[tokens, layers, top_k]``: the experts that the routers chose. The largest number of the
#: dtype means that the choice is unknown.
Experts = NDArray[np.integer[Any]]

NO_INTS: Ints = np.zeros(0, dtype=np.int32)
NO_FLOATS: Floats = np.zeros(0, dtype=np.float32)

#: Long work yields to the event loop after about so many tokens, a few milliseconds of work.
TURN_TOKENS = 2**14


def ints(values: ArrayLike) -> Ints:
    """The values as int32, ``[tokens]``; not copied if they have this type already."""
    return np.asarray(values, dtype=np.int32)


def floats(values: ArrayLike) -> Floats:
    """The values as float32, ``[tokens]``; not copied if they have this type already."""
    return np.asarray(values, dtype=np.float32)


def splitmix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A pseudo-random number for each element: SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def joined_experts(chunks: Iterable[Experts | None]) -> Experts | None:
    """The chunks concatenated along the tokens; None if no chunk was captured."""
    captured = [chunk for chunk in chunks if chunk is not None]
    if captured:
        return np.concatenate(captured)
    return None


def joined(*chunks: Ints) -> Ints:
    """The chunks concatenated; empty without chunks, which numpy rejects."""
    if chunks:
        return np.concatenate(chunks)
    return NO_INTS
