"""``python -m tests.chaos [options] -- key=value ...``: see docs/survival.md."""

from tests.chaos.command import main

if __name__ == "__main__":
    main()
