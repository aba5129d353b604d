"""Meanings of the metrics of a run, ``metrics.tsv``.

``python -m skyasync.observability.metric_names`` prints ``docs/metrics.md``.

Invariant: every metric that a run logs by itself has an entry there (a test checks it); a name in
angle brackets stands for what differs from run to run.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """An entry of the table; ``unit`` is "" for plain numbers."""

    name: str
    meaning: str
    unit: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names of the entry: ``<n>`` is a number, other brackets are any text."""
        pattern = re.escape(self.name)  # leaves angle brackets as they are
        pattern = re.sub(r"<(?!n>)\w+>", r".+", pattern)
        pattern = re.sub(r"<n>", r"-?\\d+", pattern)
        return re.compile(pattern)


with Path(__file__).with_name("metrics.tsv").open(encoding="utf-8", newline="") as _file:
    # Quotes in a meaning are text.
    _rows = csv.DictReader(_file, delimiter="\t", quoting=csv.QUOTE_NONE)
    METRICS = tuple(Metric(**row) for row in _rows)

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
    for metric in METRICS:
        if metric.name == name:
            return metric
    for metric in METRICS:
        if metric.pattern.fullmatch(name):
            return metric
    return None


def markdown() -> str:
    """The page ``docs/metrics.md``."""
    page = _INTRODUCTION
    for metric in METRICS:
        page += f"| `{metric.name}` | {metric.meaning} | {metric.unit} |\n"
    return page


if __name__ == "__main__":
    print(markdown(), end="")
