"""What the metrics of a run mean, ``metrics.tsv``:
``python -m skyasync.observability.metric_names`` prints ``docs/metrics.md``.

Invariant: every metric that a run logs by itself has an entry there (a test holds it); a name in
angle brackets stands for what differs from run to run.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """``unit`` is "" for plain numbers."""

    name: str
    meaning: str
    unit: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(
            re.sub(r"<n>", r"-?\\d+", re.sub(r"<(?!n>)\w+>", r".+", re.escape(self.name)))
        )


with Path(__file__).with_name("metrics.tsv").open(encoding="utf-8", newline="") as _file:
    METRICS = tuple(
        Metric(**row) for row in csv.DictReader(_file, delimiter="\t", quoting=csv.QUOTE_NONE)
    )

_INTRODUCTION = """\
# Metrics

<!-- python -m skyasync.observability.metric_names > docs/metrics.md -->

What a run writes to `metrics.jsonl`, one row per step, and to its trackers. A metric that does not apply is absent; one
that was NaN or infinite is null. Algorithms and callbacks of your own add theirs.

| metric | meaning | unit |
|---|---|---|
"""


def entry_of(name: str) -> Metric | None:
    """The entry that a metric's name belongs to; exact names come before those with brackets."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


def markdown() -> str:
    return _INTRODUCTION + "".join(f"| `{m.name}` | {m.meaning} | {m.unit} |\n" for m in METRICS)


if __name__ == "__main__":
    print(markdown(), end="")
