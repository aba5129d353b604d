"""Execution plans by name; ``trainer.plan`` selects one.

A plan has four class attributes:

- ``asynchronous``: samples may come from an older policy than the one that they train.
- ``streams``: groups are trained before their batch is complete, while engines go on.
- ``shares_devices``: the engines that compute on the policy's devices while requests are in flight:
  "all", or "hybrid" ones next to others.
- ``reads``: the keys that the plan reads and other plans do not. A key that the chosen plan does
  not read is an error.

``BUILTIN_PLANS`` repeats them for configuration, which reads them without importing the trainer.
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
_FULLY_ASYNC_KEYS = (
    "trainer.max_staleness",
    "trainer.staleness_bound",
    "trainer.async_generation_ratio",
    "trainer.eval_mode",
    "generator.generate_batch_size",
    "generator.max_concurrent_rollouts",
)
_PARTIAL_ROLLOUT = "trainer.partial_rollout"
_FOLDER = "skyasync.trainer.plans"

#: Plan -> its module, and its class attributes.
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
        {"asynchronous": True, "reads": (*_FULLY_ASYNC_KEYS, _PARTIAL_ROLLOUT)},
    ),
    # The engines' caches are freed with every change of devices: requests continue from their
    # tokens, and no partial rollout keeps its cache.
    "colocated_async": (
        f"{_FOLDER}.fully_async",
        {"asynchronous": True, "shares_devices": "all", "reads": _FULLY_ASYNC_KEYS},
    ),
    "hybrid_async": (
        f"{_FOLDER}.fully_async",
        {
            "asynchronous": True,
            "shares_devices": "hybrid",
            "reads": (*_FULLY_ASYNC_KEYS, _PARTIAL_ROLLOUT, "generator.hybrid_engines"),
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
