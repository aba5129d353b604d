"""Step times by a watch: the time from the end of one step to the end of the next, whatever
happened between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def step_times(rows: Sequence[Row]) -> dict[int, float]:
    """Seconds of each step of ``metrics.jsonl`` but the first, by the ``time`` at which rows were
    logged.

    An evaluation, a checkpoint or an export that followed the step is a part of it.
    """
    seconds = {}
    for i in range(1, len(rows)):
        if rows[i]["step"] == rows[i - 1]["step"] + 1:
            seconds[rows[i]["step"]] = rows[i]["time"] - rows[i - 1]["time"]
    return seconds
