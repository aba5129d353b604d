"""``python -m skyasync.testing.chaos.program key=value ...``: what ``skyasync`` trains, with parts that take orders."""

from skyasync.main import main
from skyasync.testing.chaos.struck import Struck

if __name__ == "__main__":
    main(Struck)
