"""A fork server that has imported torch and this library. Ray's workers are its forks: 0.3 s of a core each, not 4.4.

A request to its second socket gets a fork of its child, which has vLLM imported as well.

Invariant: the server never runs a Python thread or a tensor operation, and never imports Ray: Ray's workers would end
at once. A fork has the arguments, environment, folder and open files of the client process (``client.py``), which
ends when the fork ends, with the same status. A fork whose client has ended is killed. All of them end with the tests.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OF_RUNS = (
    "logging.handlers",
    "omegaconf",
    "pdb",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "tracemalloc",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "skyasync.algorithms.kl",
    "skyasync.algorithms.masked",
    "skyasync.algorithms.off_policy",
    "skyasync.algorithms.values",
    "skyasync.run.placement",
    "skyasync.run.resource_monitor",
    "skyasync.run.controller",
    "skyasync.agents.server",
    "skyasync.inference.backends.transformers.engine",
    "skyasync.inference.elastic",
    "skyasync.envs.episodes",
    "skyasync.envs.pool",
    "skyasync.examples.tiny.tasks",
    "skyasync.run.experiment",
    "skyasync.cli.train",
    "skyasync.trainer.plans.fully_async",
    "skyasync.trainer.plans.one_step_off",
    "skyasync.trainer.plans.streamed",
    "skyasync.utils.rpc",
    "skyasync.utils.rpc_server",
    "skyasync.rollout.collate",
    "skyasync.rollout.generator",
    "skyasync.rollout.generator",
    "skyasync.weight_sync.transfers.broadcast",
    "skyasync.models.fsdp.checkpoint",
    "skyasync.workers.critic",
    "skyasync.models.token_model",
    "skyasync.models.parallel",
    "skyasync.workers.policy",
    "skyasync.workers.frozen",
)
OF_RAY = (  # the imports of Ray in each of its workers: half of their start time
    "cloudpickle",
    "google.protobuf.json_format",
    "google.protobuf.reflection",
    "google.protobuf.timestamp_pb2",
    "jsonschema",
    "msgpack",
    "pyarrow.ipc",
    "pyarrow.json",
    "pydantic.json_schema",
    "pydantic.types",
    "pydantic.v1",
    "requests",
    "starlette.datastructures",
    "uvloop",
    "wcwidth",
)
OF_TESTS = ("hypothesis", "pytest")  # modules that define environments and rewards
OF_ENGINES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)
REPOSITORY = Path(__file__).parents[2]
MOST_FILES = 250  # limit of one message


def serve(path: str) -> None:
    """Serve requests to ``path`` and ``path.vllm`` until the input of this process is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listeners = {_listen(f"{path}.vllm"): OF_ENGINES}
    _import((*OF_RUNS, *OF_RAY, *OF_TESTS))
    listener = _listen(path)
    while sys.stdin not in (ready := select.select([listener, *listeners, sys.stdin], [], [])[0]):
        for more in listeners.keys() & ready:
            names = listeners.pop(more)
            if os.fork() == 0:
                listener.close()
                listener, listeners = more, {}
                os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
                _import(names)
            else:
                more.close()
        if listener in ready:
            _accept(listener)


def _import(names: tuple[str, ...]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # imports may start programs
    sys.modules["ray"] = None  # type: ignore[assignment]  # vLLM imports it where it can
    for name in names:
        if name.startswith("skyasync") or find_spec(
            name.partition(".")[0]
        ):  # uvloop, for instance, comes with vLLM
            importlib.import_module(name)
    del sys.modules["ray"]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # so that garbage collection in a fork does not visit, and thereby copy, these pages


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.closed")
    listener.listen(64)
    os.rename(f"{path}.closed", path)  # the socket is listening before it has its name
    return listener


def _accept(listener: socket.socket) -> None:
    client, _ = listener.accept()
    if os.fork() == 0:
        listener.close()
        _fork_and_report(client)
    client.close()


def _fork_and_report(client: socket.socket) -> None:
    """Fork, send the child's number to the client, and its status when it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(client, 4, MOST_FILES)
    request = json.loads(client.makefile("rb").read(int.from_bytes(length, "big")))
    child = os.fork()
    if child == 0:
        client.close()
        _run_request(request, dict(zip(request["files"], files, strict=True)))
        os._exit(0)
    for file in files:
        os.close(file)
    client.sendall(f"{child}\n".encode())
    if (
        client in select.select([client, os.pidfd_open(child)], [], [])[0]
    ):  # killed: its status says nothing more
        os.kill(child, signal.SIGKILL)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    client.sendall(f"{code}\n".encode())
    os._exit(0)


def _run_request(request: dict[str, Any], files: dict[int, int]) -> None:
    """Run the program of the interpreter that the client replaces."""
    argv, is_program = request["argv"], request["env"].pop("SKYASYNC_PROGRAM", None) is not None
    if is_program:
        os.setsid()
    else:
        os.setpgid(0, 0)  # Ray ends a worker with its whole process group
    _set_descriptors(files)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # read again from the environment
    os.chdir(request["cwd"])
    multiprocessing.set_executable(
        str(Path(os.environ["SKYASYNC_FORK_SOCKET"]).with_name("python"))
    )
    if is_program:
        _reset_process_state()
        _run_program(argv)
    elif "-c" in argv:
        _reset_process_state()
        sys.argv = argv[argv.index("-c") :]
        sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        sys.argv = _without_setup(argv)
        _reset_process_state()
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def _run_program(argv: list[str]) -> None:
    """Run what follows ``python``, a script or ``-m`` and a module, and end the process as a program ends."""
    folder = os.getcwd() if argv[0] == "-m" else str(Path(argv[0]).resolve().parent)
    sys.path[:1] = [
        folder,
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
        str(REPOSITORY),
    ]
    import skyasync  # noqa: F401  (before Ray, as in every program)
    from tests.fork_server import fork_ray_workers

    listener = Path(os.environ["SKYASYNC_FORK_SOCKET"].removesuffix(".vllm"))
    with fork_ray_workers(listener):
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
        sys.exit(0)  # flushes output and calls exit handlers inside


def _set_descriptors(files: dict[int, int]) -> None:
    """Give each file the descriptor that it has in the client."""
    above = max(*files, *files.values()) + 1
    aside = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in files.items()}
    for number, file in aside.items():
        os.dup2(file, number)
    for file in {*aside.values(), *files.values()} - files.keys():
        os.close(file)


def _reset_process_state() -> None:
    """Set what imports have fixed already: threads and compilation by the environment, and new random numbers."""
    import numpy as np
    import torch

    np.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"


def _without_setup(argv: list[str]) -> list[str]:
    """The worker's script and its arguments, without Ray's set-up script, which would start another interpreter."""
    from ray._private.runtime_env.context import (
        RuntimeEnvContext,
    )  # Ray reads the environment at import
    from ray._private.utils import update_envs

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    known, rest = parser.parse_known_args(argv)
    update_envs(
        RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}").env_vars
    )
    return rest


if __name__ == "__main__":
    serve(sys.argv[1])
