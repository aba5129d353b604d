"""``python -m tests.chaos.program key=value ...``: the training of ``skyasync``, with parts that take orders."""

from skyasync.cli.train import main
from tests.chaos.fault_hooks import FaultyExperiment

if __name__ == "__main__":
    main(FaultyExperiment)
