"""Growth over a long run: memory of each kind of process, shared memory, disk, step time.

    uv run -m benchmarks.soak [--minutes 30] [--plan fully_async] [key=value ...]

The first command's model and task, with checkpoints every 20 steps, two of which are kept. It ends
after ``--minutes``. Per metric the table has the value after the first fifth of the run (earlier
growth does not count), at the end, and the slope between, by Theil and Sen's estimator (the median
of all pairs' slopes, which single readings do not move), per hour. Fails if the memory of any kind
of process would grow by more than ``--limit`` GiB in an hour.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from skyasync.cli.train import TINY_CONFIG
from skyasync.observability.jsonl import read_rows
from skyasync.trainer.extensions.prompt_ledger import audit

HELD = ("controller", "workers", "engines", "environments", "object_store", "shared")
SETTLED = 0.2  # of the run
MOST_POINTS = 400  # points that slopes are computed from
Row = dict[str, Any]


def soak(arguments: Sequence[str], minutes: float) -> None:
    """The run, ended when its time is over.

    Raises:
        RuntimeError: if it ended by itself.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "skyasync", "train", *arguments], start_new_session=True
    )
    try:
        process.wait(60 * minutes)
        raise RuntimeError(f"the run ended by itself, with status {process.returncode}")
    except subprocess.TimeoutExpired:
        process.terminate()  # background jobs of a shell ignore Ctrl-C
    finally:
        process.wait(120)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of y by x: the median over all pairs."""
    some = points[:: max(1, len(points) // MOST_POINTS)]
    return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(some, 2) if b[0] > a[0])


def table(rows: Sequence[Row]) -> dict[str, tuple[float, float, float]]:
    """By metric: after the first fifth, at the end, growth per hour."""
    started = rows[0]["time"]
    found = {}
    settled = started + SETTLED * (rows[-1]["time"] - started)
    names = [*(f"memory/{name}_gib" for name in HELD), "disk/run_gib", "time/step_s"]
    for name in names:
        points = [
            ((row["time"] - started) / 3600, row[name])
            for row in rows
            if row["time"] > settled and name in row
        ]
        if len(points) > 2:
            found[name] = points[0][1], points[-1][1], slope(points)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--plan", default="fully_async")
    parser.add_argument("--limit", type=float, default=0.1, help="GiB per hour")
    parser.add_argument("--keep", default="", help="folder for the run; by default a temporary one")
    options, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(options.keep or temporary, "soak")
        given = [
            "--config",
            str(TINY_CONFIG),
            f"trainer.plan={options.plan}",
            "trainer.epochs=100000",
        ]
        given += [
            f"trainer.runs_dir={run.parent}",
            f"trainer.run_name={run.name}",
            "trainer.ckpt_interval=20",
        ]
        soak([*given, "trainer.max_training_steps=1000000", *settings], options.minutes)
        rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] > 0]
        twice = [
            name for name, ends in audit(read_rows(run / "ledger.jsonl")).items() if len(ends) > 1
        ]
    found = table(rows)
    print(
        f"{len(rows)} steps of {options.plan} in {(rows[-1]['time'] - rows[0]['time']) / 60:.1f} minutes"
    )
    print("| metric | behind the first fifth | at the end | growth per hour |\n|---|---|---|---|")
    for name, (first, last, growth) in found.items():
        print(f"| {name} | {first:.3f} | {last:.3f} | {growth:+.3f} |")
    grown = [
        name
        for name, (_, _, growth) in found.items()
        if name.startswith("memory/") and growth > options.limit
    ]
    print(
        f"trained twice: {', '.join(twice) or 'no prompt'}; grown: {', '.join(grown) or 'nothing'}"
    )
    if grown or twice:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
