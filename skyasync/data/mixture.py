"""Which row comes at which position of the stream, where domains have their shares.

Invariant: the order is a pure function of (seed, position). Every domain walks through all its rows, in an order of
their own, before any comes again; per pass over as many positions as there are rows, each domain has exactly its
share of them, rounded to whole prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from skyasync.errors import UserError
from skyasync.rollout.types import Prompt


class Order:
    """Positions to (pass, offset in the data set).

    Args:
        proportions: domain -> share in (0, 1]; the other rows divide the rest by their number. Empty: each pass
            is a permutation of all rows.

    Raises:
        UserError: if the shares leave rows no place, or do not add up to 1 with no rows for the rest.
    """

    def __init__(self, dataset: Sequence[Prompt], seed: int, proportions: Mapping[str, float] | None = None) -> None:
        self._seed, self._size = seed, len(dataset)
        self._parts = [np.arange(self._size)]
        shares = [1.0]
        if proportions:
            names = [str(prompt.extras.get("domain") or "") for prompt in dataset]
            self._parts, shares = _parts(names, proportions)
        self._counts = _whole(shares, self._size)
        self._pass_order = lru_cache(maxsize=4 * len(self._parts))(self._permutation)
        self._slots = lru_cache(maxsize=4)(self._slots_of)

    def at(self, position: int) -> tuple[int, int]:
        epoch, offset = divmod(position, self._size)
        part, rank = self._slots(epoch)
        mine = int(part[offset])
        times, place = divmod(epoch * self._counts[mine] + int(rank[offset]), len(self._parts[mine]))
        return times, int(self._parts[mine][self._pass_order(mine, times)[place]])

    def _slots_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """For each offset in a pass: which part's turn it is, and how often it has been before in this pass."""
        part = np.repeat(np.arange(len(self._parts)), self._counts)
        if len(self._parts) > 1:
            part = np.random.default_rng((self._seed, epoch, 0)).permutation(part)
        rank = np.empty_like(part)
        for mine in range(len(self._parts)):
            rank[part == mine] = np.arange(self._counts[mine])
        return part, rank

    def _permutation(self, part: int, times: int) -> np.ndarray:
        key = (self._seed, times) if len(self._parts) == 1 else (self._seed, times, part + 1)
        return np.random.default_rng(key).permutation(len(self._parts[part]))


def _parts(names: Sequence[str], proportions: Mapping[str, float]) -> tuple[list[np.ndarray], list[float]]:
    """The rows of each domain with a share, then those of the others, and their shares."""
    domains = np.array(names)
    parts = [np.flatnonzero(domains == name) for name in proportions]
    shares, rest = list(proportions.values()), 1.0 - sum(proportions.values())
    others = np.flatnonzero(~np.isin(domains, list(proportions)))
    if len(others):
        parts, shares = [*parts, others], [*shares, rest]
    elif abs(rest) > 1e-9:
        raise UserError(
            f"environment.domains.*.proportion sum to {1 - rest:g}, and every row belongs to one of these domains: "
            f"they must sum to 1"
        )
    for name, part, count in zip([*proportions, "the other domains"], parts, _whole(shares, len(names)), strict=False):
        if len(part) == 0 or count == 0:
            raise UserError(
                f"environment.domains: {name} has {len(part)} rows, and its proportion of {len(names)} prompts rounds "
                f"to {count}: raise or lower environment.domains.*.proportion, or remove the rows"
            )
    return parts, shares


def _whole(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in these proportions that add up to ``total``: largest remainders are rounded up."""
    exact = [share * total / sum(shares) for share in shares]
    counts = [int(number) for number in exact]
    behind = sorted(range(len(exact)), key=lambda part: (counts[part] - exact[part], part))
    for part in behind[: total - sum(counts)]:
        counts[part] += 1
    return counts
