"""``skyasync serve``: a vLLM server that can be an engine of a run on another machine.

Invariant: it is vLLM's own server, with the arguments of ``inference.backends.vllm.server``. All
other arguments are passed on unchanged; the last one of a name counts.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from skyasync.cli.commands import Arguments
from skyasync.errors import MissingVLLMError, UserError

HELP = """\
usage: skyasync serve MODEL [--port PORT] [vLLM's own arguments]

Starts vLLM's server for a run with generator.engines=[http://host:PORT]. MODEL is the model that the run trains.
The run sends weights through a file that both can see (on other machines generator.weight_sync_dir). The server binds
to 127.0.0.1; --host changes that. Every client can change its weights, unless the environment variable
SKYASYNC_ENGINES_KEY has the same secret for server and run.
"""


def serve(argv: Arguments) -> None:
    """Serve until the process is ended."""
    if argv[0].startswith("-"):
        raise UserError(
            "skyasync serve takes the model first: skyasync serve MODEL [--port PORT] ..."
        )
    if find_spec("vllm") is None:
        raise MissingVLLMError
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # it adds the routes of weight updates and pauses
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Else all servers of a machine take the same core.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm.entrypoints.launchers.api_server.entry import main
    from vllm.platforms import current_platform

    arguments = command_line(argv[0], list(argv[1:]), cpu=current_platform.is_cpu())
    sys.argv = ["skyasync serve", *arguments]
    main()


def command_line(model: str, user_arguments: list[str], *, cpu: bool) -> list[str]:
    """vLLM's arguments; the user's come last, and replace others of the same name."""
    from skyasync.inference.backends.vllm.server import ARGUMENTS, ON_CPU

    options = {"--model": model, "--host": "127.0.0.1"}
    if cpu:
        options |= ON_CPU
    options |= ARGUMENTS
    words = []
    for name, value in options.items():
        words.append(name)
        if value:  # else it is a flag
            words.append(value)
    return words + user_arguments
