"""``skyasync [COMMAND] key=value ...``, also as ``python -m skyasync``; without a command it trains.

Invariant: a subcommand's modules are imported after its name was read, so that help and errors are
fast.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from skyasync.cli.commands import SUBCOMMANDS, usage
from skyasync.errors import UserError, unknown


def command(argv: Sequence[str]) -> None:
    """Run the subcommand named first, or train. A user's error ends the program with one line."""
    subcommand = argv[0] if argv else ""
    rest = argv[1:]
    if subcommand in ("--help", "-h", "help") and not rest:
        _print_usage()
    elif subcommand in SUBCOMMANDS:
        _carry_out(subcommand, rest)
    elif re.fullmatch(r"[a-z][a-z_-]*", subcommand):
        _exit_with(
            UserError(
                unknown("subcommand", subcommand, SUBCOMMANDS)
                + "; without one, key=value starts a run"
            )
        )
    else:
        _carry_out("train", argv)


def program() -> None:
    """The console script."""
    # As with ``python -m``: modules named on the command line may be in the current folder.
    if "" not in sys.path:
        sys.path.insert(0, "")
    command(sys.argv[1:])


def _print_usage() -> None:
    try:
        print(usage(), end="", flush=True)
    except BrokenPipeError as error:
        _end_without_reader(error)


def _carry_out(subcommand: str, argv: Sequence[str]) -> None:
    try:
        status = SUBCOMMANDS[subcommand].carry_out(argv)
        sys.stdout.flush()
    except UserError as error:
        _exit_with(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except PermissionError as error:
        if not SUBCOMMANDS[subcommand].runs:
            raise
        # A subcommand that reads runs: the folder belongs to another user.
        _exit_with(UserError(f"{error.filename}: {error.strerror}"))
    except BrokenPipeError as error:
        _end_without_reader(error)
    if status:
        raise SystemExit(status)


def _end_without_reader(error: BrokenPipeError) -> NoReturn:
    """End as a program does by SIGPIPE if nothing reads its output; else raise the error."""
    if not _reader_gone():
        raise error
    raise SystemExit(128 + signal.SIGPIPE) from None


def _reader_gone() -> bool:
    """Whether nothing reads standard output any more, as after ``| head``."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)  # errors are reported without being asked for
    gone = bool(poll.poll(0))
    if gone:  # Python flushes the output at its end, which must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone


def _exit_with(error: UserError) -> None:
    from skyasync.config.load import exit_with

    exit_with(error)


if __name__ == "__main__":
    command(sys.argv[1:])
