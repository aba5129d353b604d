"""Execution plans by name; ``trainer.plan`` selects one. A file of this folder that registers a
plan is found.

A plan says four things of itself, as class attributes: ``asynchronous``, that samples may come from
an older policy than the one they train; ``streams``, that groups are trained before their batch is
complete, while engines go on; ``shares_devices``, which engines compute on the policy's devices
while requests are in flight ("all", or "hybrid" ones next to others); and ``reads``, the keys that
are its own. A key that the chosen plan does not read is refused.
"""

from pathlib import Path

from skyasync.registry import Registry

PLANS = Registry(
    "plan",
    [
        "skyasync.trainer.trainer",
        *sorted(f"{__name__}.{file.stem}" for file in Path(__file__).parent.glob("[!_]*.py")),
    ],
    capabilities={"asynchronous": False, "streams": False, "shares_devices": "", "reads": ()},
)

__all__ = ["PLANS"]
