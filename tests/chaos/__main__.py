"""``python -m tests.chaos [options] -- key=value ...``: see docs/internals/fault_injection.md."""

from tests.chaos.command import main

if __name__ == "__main__":
    main()
