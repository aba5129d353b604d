"""One Ray cluster for all tests that need one: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import skyasync  # noqa: F401  (before Ray, whose workers must not start through uv)
from skyasync.envs import ENVS

# How fast examples are drawn and run says more of the machine than of the tests.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray is up, with more CPU slots than the machine has: tests count actors, not cores."""
    import ray

    from skyasync.cluster.ray_cluster import start_on_loopback

    start_on_loopback(num_cpus=8, object_store_memory=1 << 28, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def environments_of_one_test() -> Iterator[None]:
    """What a test registers among the environments is gone behind it, whatever the order of the tests."""
    before = dict(ENVS)
    yield
    for name in ENVS.keys() - before.keys() - ENVS.builtins().keys():
        del ENVS[name]
