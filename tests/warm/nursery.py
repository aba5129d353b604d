"""A process that has imported torch and transformers, and whose forks become Ray's workers: 0.6 s of a core, not 4.4.

Invariant: this process never runs a thread, a tensor operation or Ray. A fork has the arguments, environment, folder
and streams of the process that asked for it (``stand_in.py``), which ends when the fork ends, with its status. All of
them end with the tests.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

IMPORTED = (
    "omegaconf",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)


def serve(path: str) -> None:
    """Answers whoever knocks at ``path`` until the input of this process is closed."""
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{path}.closed")
        door.listen(64)
        os.rename(f"{path}.closed", path)  # whoever finds the door finds it open
        while sys.stdin not in select.select([door, sys.stdin], [], [])[0]:
            asker, _ = door.accept()
            if os.fork() == 0:
                door.close()
                _raise_a_child(asker)
            asker.close()


def _raise_a_child(asker: socket.socket) -> None:
    """Forks again, and tells the asker the child's number, and its status at its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, _, _ = socket.recv_fds(asker, 4, 3)
    wish = json.loads(asker.makefile("rb").read(int.from_bytes(length, "big")))
    child = os.fork()
    if child == 0:
        asker.close()
        _become(wish, streams)
        os._exit(0)
    for stream in streams:
        os.close(stream)
    asker.sendall(f"{child}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    asker.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
    os._exit(0)


def _become(wish: dict[str, Any], streams: list[int]) -> None:
    """Runs Ray's worker script as the interpreter would that the asker stands in for."""
    os.setpgid(0, 0)  # Ray ends a worker with its whole process group
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(wish["env"])
    os.chdir(wish["cwd"])
    _look_unborn()
    sys.argv = _without_setup(wish["argv"])
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _look_unborn() -> None:
    """What imports have fixed already: threads as the environment has them, and random numbers of its own."""
    import numpy as np
    import torch

    np.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def _without_setup(argv: list[str]) -> list[str]:
    """The worker's script and its arguments; Ray's set-up script would only start another interpreter for it."""
    from ray._private.runtime_env.context import RuntimeEnvContext  # Ray reads the environment at import
    from ray._private.utils import update_envs

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    known, rest = parser.parse_known_args(argv)
    update_envs(RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}").env_vars)
    return rest


if __name__ == "__main__":
    serve(sys.argv[1])
