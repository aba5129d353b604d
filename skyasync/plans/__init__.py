"""Execution plans by name; ``trainer.plan`` selects one."""

from skyasync.registry import Registry

PLANS = Registry(
    "plan",
    {
        "skyasync.plans.synchronous": "sync",
        "skyasync.plans.one_step_off": "one_step_off",
        "skyasync.plans.fully_async": "fully_async",
        "skyasync.plans.streamed": "streamed",
    },
)

__all__ = ["PLANS"]
