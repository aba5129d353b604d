"""Whether this machine can have GPUs, seen without asking any library, and whether its cores can stand in for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.run.placement import plan_slots
from skyasync.workers.roles import Role

PROCESSES_PER_CORE = 8  # ranks and engines; far more than that are meant for GPUs
_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "davinci[0-9]*")


def without_gpus(address: str) -> bool:
    """A run that starts its own cluster here will find no GPU; false where that is not certain."""
    ray = sys.modules.get("ray")
    if address or (ray is not None and ray.is_initialized()):
        return False
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return hidden or not any(next(Path("/dev").glob(name), None) for name in _DEVICES)


def check_cores(cfg: Config, roles: Sequence[Role]) -> None:
    """Ranks and engines of a cluster that is started here, without GPUs, are processes that share the cores.

    Raises:
        UserError: if they are more than this machine could reasonably run.
    """
    slots, cores = plan_slots(cfg, gpus=False, roles=roles), os.cpu_count() or 1
    if len(slots.bundles) <= PROCESSES_PER_CORE * cores:
        return
    counts = ", ".join(f"{name} {len(places)}" for name, places in slots.of.items() if places)
    raise UserError(
        f"this machine has no GPU that can be used, and {cores} cores are too few for {len(slots.bundles)} processes "
        f"(at most {PROCESSES_PER_CORE} per core; {counts}): use fewer ranks "
        f"(trainer.placement.policy_num_gpus_per_node={cfg.trainer.placement.policy_num_gpus_per_node}) or engines "
        f"(generator.num_inference_engines={cfg.generator.num_inference_engines}), or join a cluster with ray.address"
    )
