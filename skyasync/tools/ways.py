"""The verbs whose work is done in other rooms."""

from __future__ import annotations

from skyasync.tools.verbs import Arguments


def train(argv: Arguments) -> None:
    """See ``skyasync.main``."""
    from skyasync.main import main

    main(argv=argv)


def plan(argv: Arguments) -> None:
    """What a run would need; see ``skyasync.planning.command``."""
    from skyasync.main import DRY_RUN, main

    main(argv=[DRY_RUN, *argv])


def simulate(argv: Arguments) -> None:
    """See ``skyasync.simulate``."""
    from skyasync.simulate.__main__ import main

    main(argv)


def translate(argv: Arguments) -> None:
    """Another framework's recipe as our configuration; see ``skyasync.interop``."""
    from skyasync.config.load import exit_with
    from skyasync.errors import UserError
    from skyasync.other_frameworks import other_frameworks

    try:
        other_frameworks().translate(argv)
    except UserError as error:
        exit_with(error)
