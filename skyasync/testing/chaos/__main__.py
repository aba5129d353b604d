"""``python -m skyasync.testing.chaos [options] -- key=value ...``: see docs/survival.md."""

from skyasync.testing.chaos.command import main

if __name__ == "__main__":
    main()
