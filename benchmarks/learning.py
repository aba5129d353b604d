"""Learning on every seed and in every plan: held-out reward before and after the laptop-sized run.

    uv run -m benchmarks.learning [key=value ...] [--seeds 0 1 2] [--plans sync one_step_off]
    [--backends transformers]

Each run is the README's first command with another seed or plan: a new process tree, start-up
included in its seconds. The model is made before the clock starts. If held-out sets have names
(data.val_sets), the first one counts, and the rewards of the others after training follow.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from skyasync.observability.summary import summarise


def run(plan: str, backend: str, seed: int, options: list[str]) -> str:
    """One run; returns its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"trainer.plan={plan}", f"generator.backend={backend}", f"trainer.seed={seed}"]
        arguments += [f"trainer.runs_dir={folder}", "trainer.run_name=run", *options]
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "skyasync", *arguments], check=True, stdout=subprocess.DEVNULL
        )
        seconds = time.monotonic() - start
        rows = [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]
    first, *others = [name for name in rows[0] if re.fullmatch(r"eval/\w+/score", name)] or [
        "eval/score"
    ]
    scores = [row[first] for row in rows if row.get(first) is not None]
    more = "".join(f" {name[5:-6]}: {rows[-1][name]:.2f} |" for name in others)
    steps = [row for row in rows if row["step"] > 0]
    gap = max(row["sync/logprob_gap"] for row in steps if "sync/logprob_gap" in row)
    staleness = median(row["staleness/mean"] for row in steps)
    rate = summarise(rows).means["throughput/samples_per_s"]  # evaluations included
    return (
        f"| `{plan}` | {backend} | {seed} | {scores[0]:.2f} | {scores[-1]:.2f} | {len(steps)} | {seconds:.0f} s "
        f"| {rate:,.0f} | {staleness:.0f} | {gap:.1e} |{more}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plans", nargs="+", default=["sync", "one_step_off"])
    parser.add_argument("--backends", nargs="+", default=["transformers"])
    arguments, options = parser.parse_known_args()
    from examples.tiny.model import build

    build()
    print(
        "| plan | engine | seed | score before | after | steps | seconds | samples/s | staleness | largest gap |"
    )
    print("|---" * 10 + "|")
    for backend in arguments.backends:
        for plan in arguments.plans:
            for seed in arguments.seeds:
                print(run(plan, backend, seed, options), flush=True)


if __name__ == "__main__":
    main()
