"""ROLL: settings, recipes, and the base class of its environments, gem's ``Env``.

``environment.env_class=my_file:MyEnv`` plays any class with this shape; ``from skyasync.interop.roll import Env`` is
for code without gem. Source: gem's ``Env`` and ROLL's page on custom environments.
"""

from __future__ import annotations

import random
from typing import Any

from skyasync.interop.system import System

__all__ = ["SYSTEM", "Env"]

Foreign = Any  # of the user's classes

SYSTEM = System("roll", "ROLL", order=3)


class Env:
    """``reset(seed)`` gives (observation, info), ``step`` (observation, reward, terminated, truncated, info)."""

    def reset(self, seed: int | None = None) -> Foreign:
        """Seeds Python's and numpy's generators; a subclass makes its first observation behind this."""
        if seed is not None:
            import numpy as np

            random.seed(seed)
            np.random.seed(seed % 2**32)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Foreign]]:
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    def sample_random_action(self) -> str:
        raise NotImplementedError

    def close(self) -> None: ...
