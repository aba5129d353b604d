"""Execution plans by name; ``trainer.plan`` selects one.

A plan says three things of itself, as class attributes: ``asynchronous``, that samples may come from an older policy
than the one they train; ``streams``, that groups are trained before their batch is complete, while engines go on; and
``reads``, the keys that are its own. A key that the chosen plan does not read is refused.
"""

from skyasync.registry import Registry

PLANS = Registry(
    "plan",
    {f"skyasync.trainer.plans.{name}": name for name in ("one_step_off", "fully_async", "streamed")}
    | {"skyasync.trainer.trainer": "sync"},
    capabilities={"asynchronous": False, "streams": False, "reads": ()},
    table={  # as the classes say (a test holds it)
        "sync": {},
        "one_step_off": {"asynchronous": True, "reads": ("trainer.async_queue_size", "trainer.eval_mode")},
        "fully_async": {
            "asynchronous": True,
            "reads": (
                "trainer.max_staleness",
                "trainer.staleness_bound",
                "trainer.async_generation_ratio",
                "trainer.partial_rollout",
                "trainer.eval_mode",
                "generator.generate_batch_size",
                "generator.max_concurrent_rollouts",
            ),
        },
        "streamed": {"streams": True},
    },
)

__all__ = ["PLANS"]
