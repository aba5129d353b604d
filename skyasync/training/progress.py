"""Where a run stands.

Invariant: these four numbers decide what comes next, they change together at three moments only (the methods below),
and ``RayPPOTrainer``'s steps are what calls them: nobody else writes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass
class Progress:
    """What has been trained, and what the engines compute with."""

    #: Training steps done.
    step: int = 0
    #: The step whose weights every engine has; tokens are stamped with it.
    version: int = 0
    #: All prompts of the stream before this one have been trained (or rejected).
    position: int = 0
    #: Prompts at or behind ``position`` that have been trained too: they overtook others.
    ahead: frozenset[int] = frozenset()

    def trained(self, position: int, ahead: frozenset[int]) -> None:
        """A training step has ended; the prompt stream stands there now."""
        self.step += 1
        self.position, self.ahead = position, ahead

    def handed_over(self) -> None:
        """Every engine computes with the newest weights."""
        self.version = self.step

    def resumed(self, step: int, position: int, ahead: Collection[int]) -> None:
        """A checkpoint has been loaded."""
        self.step, self.position, self.ahead = step, position, frozenset(ahead)
