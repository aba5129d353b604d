"""``skyasync tinker``: the Tinker API on this machine, over a run's policy and engines."""

from __future__ import annotations

from skyasync.cli.commands import Arguments, take_options, whole_number
from skyasync.errors import UserError

HELP = """\
usage: skyasync tinker [--host ADDRESS] [--port PORT] [--folder FOLDER] [--config FILE.yaml] [key=value ...]

Serves the Tinker API: programs written for Tinker's SDK train adapters of trainer.policy.model.path and sample from
them. They need TINKER_BASE_URL, which is printed, any TINKER_API_KEY that begins with tml-, and the model's path as
their base model. Only the loopback can reach the server unless --host is another address, which needs a key in the
environment variable SKYASYNC_TINKER_KEY; clients send it as TINKER_API_KEY. The port is 8333 by default.

Models, checkpoints and results are in FOLDER ("tinker", by default): the same command goes on with them.
"""
LARGEST_PORT = 65535


def tinker(argv: Arguments) -> None:
    """Serve until the process is ended."""
    options, rest = take_options(
        argv, {"--host": "192.0.2.1", "--port": "8333", "--folder": "FOLDER"}, (), settings=True
    )
    port = whole_number(options.get("--port", "8333"), "--port", 0)
    if port > LARGEST_PORT:
        raise UserError(f"--port {port}: not a whole number up to {LARGEST_PORT}")
    from skyasync.cli.train import configuration, run_or_exit
    from skyasync.other_frameworks import other_frameworks

    folder, host = options.get("--folder", ""), options.get("--host", "127.0.0.1")
    experiment = other_frameworks().tinker_server(configuration(rest), folder, host, port)
    run_or_exit(experiment, experiment.run)
