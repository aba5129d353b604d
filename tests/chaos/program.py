"""``python -m tests.chaos.program key=value ...``: what ``skyasync`` trains, with parts that take orders."""

from skyasync.cli.train import main
from tests.chaos.fault_hooks import FaultyExperiment

if __name__ == "__main__":
    main(FaultyExperiment)
