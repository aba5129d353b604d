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
    """Another system's recipe as our configuration; see ``skyasync.config.translate``."""
    from skyasync.config.translate import translate as print_translation

    print_translation(argv)
