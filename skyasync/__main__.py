"""``python -m skyasync [VERB] key=value ...``; without a verb it runs the base experiment."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

from skyasync.config.load import exit_with
from skyasync.errors import UserError, unknown
from skyasync.main import DRY_RUN, main


def plan(argv: Sequence[str]) -> None:
    """What a run would need; see ``skyasync.planning.command``."""
    main(argv=[DRY_RUN, *argv])


def translate(argv: Sequence[str]) -> None:
    """Another system's recipe as our configuration; see ``skyasync.config.translate``."""
    from skyasync.config.translate import translate as print_translation

    print_translation(argv)


VERBS: dict[str, Callable[[Sequence[str]], object]] = {"plan": plan, "translate": translate}
"""Each takes the arguments behind it. A verb is one word; settings are key=value."""


def command(argv: Sequence[str]) -> None:
    """Carry out the verb that comes first, if one does, or run."""
    first = argv[0] if argv else ""
    if first in VERBS:
        VERBS[first](argv[1:])
    elif re.fullmatch(r"[a-z]+", first):
        exit_with(UserError(unknown("verb", first, VERBS) + "; without one, key=value starts a run"))
    else:
        main(argv=argv)


if __name__ == "__main__":
    command(sys.argv[1:])
