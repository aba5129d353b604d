"""The base class of ROLL's environments, gem's ``Env``: ``from skyasync.compat.roll import Env``.

Invariant: ``environment.env_class=my_file:MyEnv`` plays any class with this shape, whatever it inherits; this one is
there so that code without gem can be imported. Source: gem's ``Env`` and ROLL's page on custom environments.
"""

from __future__ import annotations

import random

import numpy as np

from skyasync.envs.registry import Foreign

__all__ = ["Env"]


class Env:
    """``reset(seed)`` gives (observation, info), ``step`` (observation, reward, terminated, truncated, info)."""

    def reset(self, seed: int | None = None) -> Foreign:
        """Seeds Python's and numpy's generators; a subclass makes its first observation behind this."""
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Foreign]]:
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    def sample_random_action(self) -> str:
        raise NotImplementedError

    def close(self) -> None: ...
