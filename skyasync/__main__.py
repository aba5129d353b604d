"""``skyasync [VERB] key=value ...``, and ``python -m skyasync``, which is the same; without a verb it trains.

Invariant: nothing is imported before it is known what is to be done.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from skyasync.errors import UserError, unknown
from skyasync.tools.verbs import LISTED, VERBS, usage


def command(argv: Sequence[str]) -> None:
    """Carry out the verb that comes first, if one does, or train. Ends the program with one line on a user's error."""
    first, rest = (argv[0], argv[1:]) if argv else ("", [])
    if first in ("--help", "-h", "help") and not rest:
        print(usage(), end="")
    elif first in VERBS:
        _carry_out(first, rest)
    elif re.fullmatch(r"[a-z][a-z_-]*", first):
        _exit_with(UserError(unknown("verb", first, LISTED) + "; without one, key=value starts a run"))
    else:
        _carry_out("train", argv)


def program() -> None:
    """The console script. Files named on the command line are found as by ``python -m``: from the folder one is in."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    command(sys.argv[1:])


def _carry_out(verb: str, argv: Sequence[str]) -> None:
    try:
        status = VERBS[verb].carry_out(argv)
    except UserError as error:
        _exit_with(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
    if status:
        raise SystemExit(status)


def _exit_with(error: UserError) -> None:
    from skyasync.config.load import exit_with

    exit_with(error)


if __name__ == "__main__":
    command(sys.argv[1:])
