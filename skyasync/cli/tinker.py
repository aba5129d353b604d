"""``skyasync tinker``: the Tinker API on this machine, over a run's policy and engines."""

from __future__ import annotations

from skyasync.cli.commands import Arguments, take_options, whole_number
from skyasync.errors import UserError

HELP = """\
usage: skyasync tinker [--host ADDRESS] [--port PORT] [--folder FOLDER] [--config FILE.yaml] [key=value ...]

Serves the Tinker API: programs of Tinker's SDK train adapters of trainer.policy.model.path and sample from them. They
need the printed TINKER_BASE_URL, a TINKER_API_KEY that begins with tml-, and the model's path as their base model.

--host    the address to bind to (127.0.0.1); another address needs a key in SKYASYNC_TINKER_KEY, which clients send as
          TINKER_API_KEY
--port    8333 by default
--folder  models, checkpoints and results ("tinker"); the same command continues with them
"""
LARGEST_PORT = 65535  # of TCP


def tinker(argv: Arguments) -> None:
    """Serve until the process is ended."""
    values = {"--host": "192.0.2.1", "--port": "8333", "--folder": "FOLDER"}
    options, rest = take_options(argv, values, settings=True)
    port = whole_number(options.get("--port", "8333"), "--port", 0)  # 0 is a free port
    if port > LARGEST_PORT:
        raise UserError(f"--port {port}: not a whole number up to {LARGEST_PORT}")
    # Imported here, so that wrong options are errors at once.
    from skyasync.cli.train import configuration, run_or_exit
    from skyasync.other_frameworks import other_frameworks

    folder = options.get("--folder", "")
    host = options.get("--host", "127.0.0.1")
    experiment = other_frameworks().tinker_server(configuration(rest), folder, host, port)
    run_or_exit(experiment, experiment.run)
