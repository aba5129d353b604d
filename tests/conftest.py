"""One Ray cluster for all tests that need one: starting it takes longer than most of them."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

import skyasync  # noqa: F401  (before Ray, whose workers must not start through uv)
from skyasync.envs import ENVS
from tests.fork_server import (
    FAILURES,
    TEMPORARY,
    fork_ray_workers,
    fork_spawned_processes,
    import_vllm_in_ray_workers,
    start_fork_server,
)

# Examples take longer on a busy machine; their time is no property of the code under test.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


# A module that tests import is compiled once, not by each process that tests start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# torch's stores look up the names of addresses; a name server that does not answer would cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Temporary folders are in memory if there is enough: syncing a file is then free, and the tests sync many.
if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """The tests of a file share slow fixtures, so one process runs them; ``-n 2`` starts with the slow files."""
    config.option.loadscopereorder = False  # by number of tests, the quick files would come first
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


def pytest_collection_finish() -> None:
    """Exclude all imported modules from garbage collection, which would take a tenth of the quick tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


FORK_SOCKET = "SKYASYNC_TESTS_FORK_SOCKET"


def pytest_configure(config: pytest.Config) -> None:
    """The processes of ``-n 2`` share one fork server."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        shared = start_fork_server()
        os.environ[FORK_SOCKET] = str(shared.__enter__())
        config.add_cleanup(lambda: shared.__exit__(None, None, None))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in FAILURES:
        terminalreporter.write_line(reason, red=True)


@pytest.fixture(scope="session")
def fork_socket() -> Iterator[Path]:
    if FORK_SOCKET in os.environ:
        yield Path(os.environ[FORK_SOCKET])
        return
    with start_fork_server() as fork_socket:
        yield fork_socket


@pytest.fixture(scope="module")
def engines_session(fork_socket: Path) -> Iterator[None]:
    """The processes of vLLM engines that a test starts are forks with vLLM imported."""
    with fork_spawned_processes(fork_socket, vllm=True):
        yield


@pytest.fixture(scope="session")
def ray_session(fork_socket: Path) -> Iterator[None]:
    """A running Ray cluster, with more CPU slots than the machine has: tests count actors, not cores."""
    import ray

    from skyasync.run.ray_cluster import start_on_loopback

    tempfile.gettempdir()  # kept: this process's files, and Ray's, would be in this folder
    with (
        fork_ray_workers(fork_socket),
        tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, {TEMPORARY: folder}),
    ):
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = folder
        start_on_loopback(num_cpus=8, object_store_memory=1 << 28, log_to_driver=False)
        del os.environ[
            "TMPDIR"
        ]  # Ray has set other variables too, which are for programs that join
        os.environ |= {"TMPDIR": before} if before is not None else {}
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def engines_on_ray(ray_session: None, fork_socket: Path) -> Iterator[None]:
    """The Ray actors of vLLM engines that a test's run starts have vLLM imported, too."""
    with import_vllm_in_ray_workers(fork_socket):
        yield


@pytest.fixture(autouse=True)
def process_group_of_one_test() -> Iterator[None]:
    """A sharded model on one rank creates torch's default process group in the test's own process."""
    yield
    if (
        distributed := sys.modules.get("torch.distributed")
    ) is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def environments_of_one_test() -> Iterator[None]:
    """Environments that a test registers are removed after it, in any order of the tests."""
    before = dict(ENVS)
    yield
    for name in ENVS.keys() - before.keys() - ENVS.builtins().keys():
        del ENVS[name]
