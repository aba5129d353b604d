"""The off-policy mathematics of reinforcement learning: pure functions on ``[batch, length]`` tensors with masks.

Invariant: importing this package imports no torch; the registries load a module when one of its names is asked
for. The functions import nothing of the library but its registries and errors.
"""

from skyasync.algorithms.registries import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSS_REDUCTIONS,
    POLICY_LOSSES,
)

__all__ = ["ADVANTAGE_ESTIMATORS", "CORRECTIONS", "KL_ESTIMATORS", "LOSS_REDUCTIONS", "POLICY_LOSSES"]
