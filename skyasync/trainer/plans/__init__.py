"""Execution plans by name; ``trainer.plan`` selects one.

A plan says four things of itself: ``asynchronous``, that samples may come from an older policy than
the one they train; ``streams``, that groups are trained before their batch is complete, while
engines go on; ``shares_devices``, which engines compute on the policy's devices while requests are
in flight ("all", or "hybrid" ones next to others); and ``reads``, the keys that are its own. A key
that the chosen plan does not read is rejected.

They are class attributes of the plan. ``BUILTIN_PLANS`` repeats them for configuration, which reads
them without importing the trainer.
"""

from functools import cached_property
from typing import Any

from skyasync.registry import About, Registry

CAPABILITIES: dict[str, Any] = {
    "asynchronous": False,
    "streams": False,
    "shares_devices": "",
    "reads": (),
}
_FULLY_ASYNC = (
    "trainer.max_staleness",
    "trainer.staleness_bound",
    "trainer.async_generation_ratio",
    "trainer.eval_mode",
    "generator.generate_batch_size",
    "generator.max_concurrent_rollouts",
)
_PARTIAL = "trainer.partial_rollout"
_FOLDER = "skyasync.trainer.plans"

#: Plan -> its module, and what it says of itself.
BUILTIN_PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("skyasync.trainer.trainer", {}),
    "streamed": (
        f"{_FOLDER}.streamed",
        {"streams": True, "reads": ("trainer.stream_groups",)},
    ),
    "one_step_off": (
        f"{_FOLDER}.one_step_off",
        {"asynchronous": True, "reads": ("trainer.async_queue_size", "trainer.eval_mode")},
    ),
    # max_staleness=0 makes it synchronous.
    "fully_async": (
        f"{_FOLDER}.fully_async",
        {"asynchronous": True, "reads": (*_FULLY_ASYNC, _PARTIAL)},
    ),
    # The engines' caches are freed with every change of devices: requests continue from their
    # tokens, and no partial rollout keeps its cache.
    "colocated_async": (
        f"{_FOLDER}.fully_async",
        {"asynchronous": True, "shares_devices": "all", "reads": _FULLY_ASYNC},
    ),
    "hybrid_async": (
        f"{_FOLDER}.fully_async",
        {
            "asynchronous": True,
            "shares_devices": "hybrid",
            "reads": (*_FULLY_ASYNC, _PARTIAL, "generator.hybrid_engines"),
        },
    ),
}


class PlanRegistry(Registry):
    """``BUILTIN_PLANS`` and the plans of users."""

    @cached_property
    def _builtins(self) -> dict[str, tuple[str, About]]:
        return {
            name: (module, About(can={**CAPABILITIES, **capabilities}))
            for name, (module, capabilities) in BUILTIN_PLANS.items()
        }


PLANS = PlanRegistry("plan", capabilities=CAPABILITIES)

__all__ = ["PLANS"]
