"""Execution plans by name; ``trainer.plan`` selects one.

A plan says two things of itself, as class attributes: ``asynchronous``, that samples may come from an older policy than
the one they train, and ``reads``, the keys that are its own. A key that the chosen plan does not read is refused.
"""

from skyasync.registry import Registry

PLANS = Registry(
    "plan",
    [f"skyasync.plans.{module}" for module in ("synchronous", "one_step_off", "fully_async")],
    capabilities={"asynchronous": False, "reads": ()},
)

__all__ = ["PLANS"]
