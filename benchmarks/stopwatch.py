"""Whether the seconds that a run reports are those of a watch, for every plan.

    uv run -m benchmarks.stopwatch [key=value ...] [--steps 25] [--plans sync fully_async ...]
    uv run -m benchmarks.stopwatch generator.backend=vllm

Each plan trains the tiny model in a process tree of its own, with the first command's settings and
its evaluations. "By the watch" is the difference of ``time`` between the first and last row of
``metrics.jsonl``. "By time/step_s" is the sum over the rows after the first, and "between" that of
``time/eval_s``, ``time/checkpoint_s`` and ``time/export_s``. Together they should be what the watch
says: "difference" is how far they are from it, and "largest" the largest difference of one step,
which may be the time of a callback. "Reported" is the summary's rate.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.step_ends import step_times
from skyasync.observability.jsonl import read_rows
from skyasync.observability.summary import summarise

BETWEEN = ("time/eval_s", "time/checkpoint_s", "time/export_s")
PLANS = {
    "sync": (),
    "one_step_off": (),
    "fully_async": (),
    "streamed": (),
    "colocated_async": ("trainer.placement.colocate_all=true",),
    "hybrid_async": ("generator.hybrid_engines=1",),
}


def rows_of_a_run(plan: str, steps: int, options: list[str]) -> list[dict[str, Any]]:
    """The steps of ``metrics.jsonl``.

    Raises:
        RuntimeError: with the last line that the run has printed, if it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            f"trainer.plan={plan}",
            f"trainer.max_training_steps={steps}",
            "trainer.eval_interval=5",
        ]
        arguments += [f"trainer.runs_dir={folder}", "trainer.run_name=run", *PLANS[plan], *options]
        command = [sys.executable, "-m", "skyasync", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
        rows = read_rows(Path(folder, "run", "metrics.jsonl"))
    return [row for row in rows if row["step"] > 0]


def line(plan: str, rows: list[dict[str, Any]]) -> str:
    """A row of the table."""
    later = rows[1:]
    watch_s = rows[-1]["time"] - rows[0]["time"]
    steps_s = sum(row["time/step_s"] for row in later)
    between_s = sum(row.get(name, 0.0) for row in later for name in BETWEEN)
    reported = {
        row["step"]: row["time/step_s"] + sum(row.get(name, 0.0) for name in BETWEEN)
        for row in later
    }
    largest_s = max(abs(seconds - reported[step]) for step, seconds in step_times(rows).items())
    samples = sum(row["throughput/samples_per_s"] * row["time/interval_s"] for row in later)
    rate = summarise(rows).means["throughput/samples_per_s"]
    cells = [
        f"{watch_s:.2f} s",
        f"{steps_s:.2f} s",
        f"{between_s:.2f} s",
        f"{(steps_s + between_s) / watch_s - 1:+.2%}",
        f"{largest_s:.3f} s",
        f"{samples / watch_s:.0f}",
        f"{rate:.0f}",
    ]
    return f"| `{plan}` | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS)
    arguments, options = parser.parse_known_args()
    titles = (
        "plan",
        "by the watch",
        "by time/step_s",
        "between",
        "difference",
        "largest",
        "samples/s by the watch",
        "reported",
    )
    print("| " + " | ".join(titles) + " |")
    print("|---" * len(titles) + "|")
    for plan in arguments.plans:
        try:
            print(line(plan, rows_of_a_run(plan, arguments.steps, options)), flush=True)
        except RuntimeError as error:
            print(f"| `{plan}` | {error}" + " |" * (len(titles) - 1), flush=True)


if __name__ == "__main__":
    main()
