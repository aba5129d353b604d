"""Joining a Ray cluster, or starting one on this machine's loopback and ending it again.

Invariant: a cluster that is started here is ended here, and with the process that started it
(``watchdog``). It listens on no other interface, accepts only this user's token, and keeps its
files in a folder that this user alone can enter. A cluster that was there before is left as it was.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.inference.backends.vllm.process_guard import PLACE
from skyasync.run.logs import ProcessLogs, bring_to
from skyasync.run.placement import plan_slots, resources, too_small
from skyasync.run.watchdog import Watchdog
from skyasync.workers.roles import Role

log = logging.getLogger(__name__)

_AGENT = re.compile(r"one Ray agent failed, agent_name = (\w+)")  # in a raylet's log
ANSWER_S = 10.0  # for a connection to a cluster that may be on another continent
ENDING_S = 1.0  # from the end of a raylet's children to its end; 0.1 s were measured
SMALL_OBJECT_STORE = 1 << 30  # bytes; without GPUs only batches of small models pass through it
#: Environment variables that ranks and engines of a joined cluster receive from the driver. Ray
#: starts its workers with the environment of ``ray start``, so without these an interface for NCCL
#: or a token of the hub would reach none.
FORWARDED_PREFIXES = (
    "NCCL_",
    "GLOO_",
    "HF_",
    "HUGGING_FACE_",
    "VLLM_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "UCX_",
)


@contextmanager
def cluster(
    cfg: Config, *, roles: Sequence[Role], logs: ProcessLogs | None = None
) -> Iterator[bool]:
    """Initialise Ray inside the block; yields whether there are GPUs.

    Args:
        logs: gets the output of the processes, to the last line; by default Ray prints it.

    Raises:
        UserError: if no cluster answers at ``ray.address``, or this machine has too few devices.
    """
    _prepare_environment()
    import ray

    started_here = not ray.is_initialized()
    if started_here and cfg.ray.address:
        _join(cfg.ray.address)
    elif started_here:
        # A CPU for each process at least: on few cores they share them.
        slots = plan_slots(cfg, gpus=False, roles=roles)
        cores = max(os.cpu_count() or 1, len(slots.bundles))
        has_gpus = os.path.exists("/dev/nvidia0")
        start_on_loopback(
            num_cpus=cores, object_store_memory=None if has_gpus else SMALL_OBJECT_STORE
        )
    undo = bring_to(logs) if logs is not None else None
    try:
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        slots = plan_slots(cfg, gpus=gpus, roles=roles)
        # Not for a cluster that was joined: it may grow when it is asked for more.
        if started_here and not cfg.ray.address:
            needed, available = resources(slots)
            if any(needed[name] > available[name] for name in needed):
                raise too_small(slots, "on this machine")
        yield gpus
    finally:
        if started_here:
            if ended():  # a call to such a Ray would return late, or end this process
                atexit.unregister(ray.shutdown)
            else:
                ray.shutdown()
            _watched_by(None)
        if undo is not None:
            undo()


def start_on_loopback(
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    object_store_memory: int | None = None,
    log_to_driver: bool = True,
    runtime_env: dict[str, object] | None = None,
) -> None:
    """Start a cluster that no other machine can reach. The arguments are those of ``ray.init``."""
    _prepare_environment()
    import ray
    from ray._private import parameter, services

    keep_token_private()
    watchdog = Watchdog()
    _watched_by(watchdog)
    prestart = "RAY_prestart_worker_first_driver"
    variables = {
        prestart: os.environ.get(prestart, "0"),
        PLACE: watchdog.folder,
        **watchdog.variables,
    }
    with (
        _loopback_only(),
        # Signals for the program's process group, as schedulers and terminals send them, do not end
        # Ray under the run. The kernel still ends Ray's processes with the program's.
        _patched(services, "ConsolePopen", partial(services.ConsolePopen, process_group=0)),
        # A run on one machine does not need the autoscaler, the server of a dashboard that is
        # switched off, and workers that wait for tasks when there are only actors. They are two
        # fifths of the time of Ray's start.
        _patched(parameter, "RayParams", partial(parameter.RayParams, no_monitor=True)),
        _patched(services, "start_api_server", _no_api_server),
        _variables(variables),
    ):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                logging_level=logging.ERROR,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                object_store_memory=object_store_memory,
                log_to_driver=log_to_driver,
                runtime_env=runtime_env,
                _temp_dir=os.path.join(watchdog.folder, "ray"),
            )
        except BaseException:
            _watched_by(None)
            raise


def _no_api_server(*_: object, **__: object) -> tuple[None, None]:
    """Replaces a function of Ray that returns an address and a process."""
    return None, None


def await_end() -> None:
    """Wait for the raylet's end for a moment, after a process that it had started has failed.

    If the raylet ends, its children end before it.
    """
    deadline = time.monotonic() + ENDING_S
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.02)


def ended() -> str:
    """A message about an essential process of Ray that has ended; "" if none has.

    Only processes that this one has started are checked, and not the log monitor: a run continues
    without it.
    """
    from ray._private import worker

    node: Any = worker._global_node
    if node is None:
        return ""
    for name, title in (("gcs_server", "GCS server"), ("raylet", "raylet")):
        for info in node.all_processes.get(name, ()):
            status = info.process.poll()
            if status is None:
                continue
            how = f"signal {-status}" if status < 0 else f"status {status}"
            agent = _failed_agent(Path(node.get_logs_dir_path()))
            cause = f", after its {agent}" if agent else ""
            return f"Ray's {title} (process {info.process.pid}) has ended with {how}{cause}"
    return ""


def _failed_agent(logs: Path) -> str:
    """The agent whose end has ended the raylet, which only the raylet's log names; or ""."""
    for file in logs.glob("raylet.*"):
        with contextlib.suppress(OSError):
            match = _AGENT.search(file.read_text(encoding="utf-8", errors="replace"))
            if match is not None:
                return match[1]
    return ""


_watchdog: Watchdog | None = None  # of the latest Ray that this process has started


def _watched_by(watchdog: Watchdog | None) -> None:
    """Replace the watchdog, and close the former one."""
    global _watchdog
    former = _watchdog
    _watchdog = watchdog
    if former is not None:
        former.close()


def keep_token_private() -> None:
    """Make the file of Ray's token readable by this user alone: the token lets anyone run code."""
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        return  # Ray does not read the file then
    path = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # without a home folder Ray raises an error itself
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            # O_EXCL and the mode: no moment at which another user could read or write it.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
        if path.stat().st_uid == os.getuid():
            path.chmod(0o600)


def _prepare_environment() -> None:
    """Set variables that Ray reads when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise Ray hides all GPUs from an actor that takes none of them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def _join(address: str) -> None:
    """Join the cluster at ``ray.address``."""
    import ray

    if address != "auto":  # a check that fails soon: Ray itself would try for two minutes
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"ray.address={address!r} is neither 'auto' nor host:port")
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        except OSError as error:
            raise UserError(f"ray.address={address!r}: nothing answers there ({error})") from error
    local = address.startswith(("127.", "localhost:"))  # one that `start_on_loopback` has started
    variables = forwarded_variables(os.environ)
    if variables:
        names = ", ".join(sorted(variables))
        log.info("the cluster's processes receive from this shell: %s", names)
    try:
        with _loopback_only() if local else nullcontext():
            ray.init(
                address=address,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": variables} if variables else None,
            )
    except ConnectionError as error:
        raise UserError(
            f"ray.address={address!r}: no Ray cluster answers there ({error})"
        ) from error


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables for the processes of a joined cluster (``FORWARDED_PREFIXES``).

    Those that ``ray job submit`` has set are left out: the job's processes have them, and Ray
    rejects a variable that is named twice.
    """
    job = json.loads(environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    job_environment = job.get("runtime_env") or {}
    job_variables = job_environment.get("env_vars") or {}
    forwarded = {}
    for name, value in environment.items():
        if name.startswith(FORWARDED_PREFIXES) and name not in job_variables:
            forwarded[name] = value
    return forwarded


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Have Ray listen on the loopback alone inside the block.

    Ray turns 127.0.0.1 into the machine's address unless it may not form clusters, which is its
    default outside of Linux. This process reads the switch at import, its children at their start.
    """
    from ray._private import ray_constants

    with (
        _patched(ray_constants, "ENABLE_RAY_CLUSTER", False),
        _variables({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}),
    ):
        yield


@contextmanager
def _patched(module: object, name: str, value: object) -> Iterator[None]:
    original = vars(module)[name]
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    previous = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
