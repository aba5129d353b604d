"""Execution plans by name; ``trainer.plan`` selects one.

A plan says three things of itself, as class attributes: ``asynchronous``, that samples may come from an older policy
than the one they train; ``streams``, that groups are trained before their batch is complete, while engines go on; and
``reads``, the keys that are its own. A key that the chosen plan does not read is refused.
"""

from skyasync.registry import Registry

PLANS = Registry(
    "plan",
    [f"skyasync.plans.{module}" for module in ("synchronous", "one_step_off", "fully_async", "streamed")],
    capabilities={"asynchronous": False, "streams": False, "reads": ()},
)

__all__ = ["PLANS"]
