"""Joining a Ray cluster, or starting one on this machine's loopback and ending it again.

Invariant: what is started here is ended here; a cluster that was there before is left as it was.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skyasync.errors import UserError
from skyasync.workers.placement import plan_slots

SMALL_OBJECT_STORE = 1 << 30  # bytes; without GPUs only batches of small models pass through it


@contextmanager
def cluster(cfg: Any, *, with_reference: bool) -> Iterator[bool]:
    """Ray is up inside; yields whether there are GPUs.

    Raises:
        UserError: if ``ray.address`` names no cluster that answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Under `uv run` Ray would start every worker through uv again, in an environment that uv makes anew.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    mine = not ray.is_initialized()
    if mine:
        _join(ray, cfg.ray.address) if cfg.ray.address else _start(ray, cfg, with_reference)
    try:
        yield ray.cluster_resources().get("GPU", 0) > 0
    finally:
        if mine:
            ray.shutdown()


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise UserError(f"ray.address={address!r}: no Ray cluster answers there ({error})") from error


def _start(ray: Any, cfg: Any, with_reference: bool) -> None:
    bundles = plan_slots(cfg, gpus=False, with_reference=with_reference).bundles
    cores = os.cpu_count() or 1
    has_gpus = os.path.exists("/dev/nvidia0")
    ray.init(
        address="local",
        num_cpus=max(cores, len(bundles)),
        object_store_memory=None if has_gpus else SMALL_OBJECT_STORE,
        include_dashboard=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
