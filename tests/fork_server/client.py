"""Started in place of an interpreter: requests a fork from the server, and ends when the fork ends.

Invariant: imports the standard library only, passes all its open files to the fork, and ends with the fork's status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

IMPORTS_S = 120.0  # on a busy machine; on an idle one they take five


def main() -> int:
    files = _open_files()
    with _connect() as server:
        fields = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "files": files}
        request = json.dumps(fields).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], files)
        server.sendall(request)
        answers = server.makefile("r")
        fork = int(answers.readline())
        if (
            "SKYASYNC_PROGRAM" in os.environ
        ):  # the fork has another process group, since it has its own session
            signal.signal(signal.SIGTERM, lambda *_: os.killpg(fork, signal.SIGTERM))
            signal.signal(signal.SIGINT, lambda *_: os.killpg(fork, signal.SIGINT))
        else:
            signal.signal(signal.SIGTERM, lambda *_: os.kill(fork, signal.SIGTERM))
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = int(answers.readline() or 1)
    if code < 0:
        if -code != signal.SIGKILL:  # vLLM's processes can start in no other way
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _open_files() -> list[int]:
    """The files that the process which started this one left open; they stay open here until the fork ends."""
    numbers = map(int, os.listdir("/proc/self/fd"))
    return sorted(number for number in numbers if os.path.exists(f"/proc/self/fd/{number}"))


def _connect() -> socket.socket:
    """Wait until the server has finished its imports, which began with the tests.

    Raises:
        FileNotFoundError: if the imports take too long, or have failed.
    """
    address = os.environ["SKYASYNC_FORK_SOCKET"]
    ray_imports_vllm = os.path.exists(
        os.environ.get("SKYASYNC_ENGINES", "")
    )  # the likely reason: a test says so
    if ray_imports_vllm and not address.endswith(".vllm"):
        address += ".vllm"
    server = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + IMPORTS_S
    while True:
        try:
            server.connect(address)
            return server
        except FileNotFoundError:
            if time.monotonic() > deadline or os.path.exists(f"{os.path.dirname(address)}/failed"):
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
