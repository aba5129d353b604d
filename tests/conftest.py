"""One Ray cluster for all tests that need one: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray is up, with more CPU slots than the machine has: tests count actors, not cores."""
    import ray

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=1 << 28,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
