"""``skyasync [COMMAND] key=value ...``, and ``python -m skyasync``, which is the same; without a
subcommand it trains.

Invariant: nothing is imported before it is known what is to be done.
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
    subcommand, rest = (argv[0], argv[1:]) if argv else ("", [])
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
    """The console script. Files named on the command line are found as by ``python -m``: from the
    folder one is in."""
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
        raise SystemExit(130) from None
    except PermissionError as error:
        if not SUBCOMMANDS[subcommand].runs:  # else it is of another user's run
            raise
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
    """Whether nothing reads standard output any more, as after ``| head``; from then on it leads
    nowhere."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    gone = bool(poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone


def _exit_with(error: UserError) -> None:
    from skyasync.config.load import exit_with

    exit_with(error)


if __name__ == "__main__":
    command(sys.argv[1:])
