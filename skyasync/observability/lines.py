"""Metrics as words: how a figure reads in a line.

Invariant: a metric that is absent leaves no trace, one that is ``None`` (it was NaN or infinite)
shows as nan.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

Metrics = Mapping[str, float | None]

#: metric -> how it reads; the order is that of the line.
FORMATS: tuple[tuple[str, str], ...] = (
    ("reward/mean", "reward {:.2f}"),
    ("sft/loss", "loss {:.3f}"),
    ("eval/loss", "eval loss {:.3f}"),
    ("eval/score", "eval {:.2f}"),
    ("response/length_mean", "len {:.1f}"),
    ("throughput/tokens_per_s", "{:,.0f} tok/s"),
    ("staleness/mean", "staleness {:.2f}"),
)


def status_line(step: int, metrics: Metrics, total: int | None = None) -> str:
    """``step 12/60  reward 0.63  eval 0.61  ...  idle trainer 12% engines 31%  1.4 s/step``."""
    position = f"step {step}"
    if total is not None:
        digits = len(str(total))  # so that the lines of a run are aligned
        position = f"step {step:>{digits}}/{total}"
    return "  ".join([position, *words(metrics)])


def words(metrics: Metrics) -> Iterator[str]:
    """The figures of the line; absent metrics are left out."""
    for name, text in FORMATS:
        if name in metrics:
            yield text.format(_number(metrics[name]))
    idle = []
    for process in ("trainer", "engines"):
        name = f"idle/{process}"
        if name in metrics:
            idle.append(f"{process} {_number(metrics[name]):.0%}")
    if idle:
        yield "idle " + " ".join(idle)
    if "time/step_s" in metrics:
        yield f"{_number(metrics['time/step_s']):.1f} s/step"


def duration(seconds: float) -> str:
    """``0:42``, ``12:07``, ``1:03:20``."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"


def _number(value: float | None) -> float:
    if value is None:
        return float("nan")
    return value


def write_plainly(lines: Sequence[str], error: bool) -> None:
    """Write lines to standard output, or to standard error.

    Raises:
        OSError: if the reader is gone.
    """
    stream = sys.stderr if error else sys.stdout
    stream.write("".join(f"{line}\n" for line in lines))  # one write, for whole lines
    stream.flush()
