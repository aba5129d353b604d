"""Overhead of a code reward: medians of ``code_tests`` on programs that do nothing.

    python -m benchmarks.code_rewards            # every sandbox that works here

One test per response. ``program`` prints its input; ``assert`` equals a literal, which is compared
at once; ``check`` needs a second process for the rest of its statement.
"""

from __future__ import annotations

import argparse
import statistics
import time

from skyasync.errors import UserError
from skyasync.rewards import sandbox
from skyasync.rewards.code import code_tests

CODE = "def f(x):\n    return x\nif __name__ == '__main__':\n    print(input())"
LABELS = {
    "program": {"inputs": ["1"], "outputs": ["1"]},
    "assert": ["assert f(1) == 1"],
    "check": ["assert abs(f(1) - 1) < 1e-6"],
}


def milliseconds(label: object, where: str, responses: int) -> float:
    """The median."""
    taken = []
    for _ in range(responses):
        began = time.perf_counter()
        code_tests(
            CODE.replace("print(input())", "pass") if isinstance(label, list) else CODE,
            label,
            where,
        )
        taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=50)
    responses = parser.parse_args().responses
    for where in ("none", "seccomp", "landlock", "bubblewrap"):
        try:
            sandbox.choose(where)
        except UserError as problem:
            print(problem)
            continue
        print(
            where,
            {
                name: f"{milliseconds(label, where, responses):.0f} ms"
                for name, label in LABELS.items()
            },
        )


if __name__ == "__main__":
    main()
