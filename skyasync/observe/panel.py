"""The live view's panel: what a report says, in as many lines as there is room for.

Invariant: a pure function of the report, the history and the room. No line is longer than the room is wide, none wraps,
and what matters least is left out first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from skyasync.observability.lines import Metrics, duration
from skyasync.observability.progress import ProgressReport, Sample

BARS = "▁▂▃▄▅▆▇█"
HOLDERS = ("controller", "workers", "engines", "environments")
LABEL = 8  # columns of a row's name
LEAST_WIDTH = 20  # below it names are left out
_ENGINE = re.compile(r"throughput/engine_(\d+)_tokens_per_s")
NEVER_FULL = 1  # a full last column makes some terminals wrap


@dataclass
class History:
    """What a panel shows of the steps before the last."""

    rewards: list[float] = field(default_factory=list)
    best: float | None = None
    best_step: int = 0

    def add(self, step: int, row: Metrics) -> None:
        if (reward := row.get("reward/mean")) is not None:
            self.rewards = [*self.rewards[-199:], reward]
        score = row.get("eval/score")
        if score is not None and (self.best is None or score > self.best):
            self.best, self.best_step = score, step


def sparkline(values: Sequence[float]) -> str:
    """The values as bars from their lowest to their highest."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def panel(report: ProgressReport, history: History, width: int, height: int) -> list[Text]:
    """The lines, at most ``height - 1`` of them: the cursor's line of a small terminal is left alone."""
    width = max(1, width - NEVER_FULL)
    rows = [
        ("speed", _speed(report.metrics)),
        ("waits", _waits(report)),
        ("stale", _stale(report.metrics)),
        ("memory", _memory(report.metrics)),
        ("sample", _sample(report.sample)),
        ("warning", _warnings(report)),
    ]
    named = [("reward", _reward(report.metrics, history, width)), *((name, Text(text)) for name, text in rows)]
    kept = [(name, text) for name, text in named if text.plain]
    least = ["memory", "sample", "stale", "speed", "waits", "reward", "warning"]  # which goes first
    while len(kept) > max(0, height - 2) and kept:
        gone = min(kept, key=lambda row: least.index(row[0]))
        kept.remove(gone)
    lines = [_head(report, width), *(_row(name, text, width) for name, text in kept)]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def _row(name: str, text: Text, width: int) -> Text:
    if width < LEAST_WIDTH:
        return text
    style = "yellow" if name == "warning" else "dim"
    return Text.assemble((f"{name:<{LABEL}}", style), text)


def _head(report: ProgressReport, width: int) -> Text:
    """``step 12/80 ━━━━━━────── 0:42, 1:53 left, training``; the bar takes what the words leave."""
    line = Text(f"step {report.step}/{report.total}" if report.total else report.phase, style="bold")
    left = "" if report.eta_s is None or report.step >= report.total else f", {duration(report.eta_s)} left"
    words = f" {duration(report.elapsed_s)}{left}"
    phase = f", {report.phase}" if report.total and report.phase else ""
    room = min(30, width - cell_len(line.plain) - cell_len(words + phase) - 1)
    if report.total and room >= 8:
        done = round(room * min(1.0, report.step / report.total))
        line.append(" ")
        line.append("━" * done, style="green")
        line.append("─" * (room - done), style="dim")
    return line.append(words).append(phase, style="dim")


def _reward(metrics: Metrics, history: History, width: int) -> Text:
    """The mean reward, its course, the score: the course takes what the words leave."""
    value, score = metrics.get("reward/mean"), metrics.get("eval/score")
    words = [] if value is None else [Text(f"{value:.2f}")]
    best = "" if history.best is None else f", best {history.best:.2f} at step {history.best_step}"
    evaluation = [] if score is None else [Text(f"eval {score:.2f}{best}", style="green")]
    room = min(60, width - LABEL - sum(cell_len(text.plain) + 2 for text in words + evaluation))
    if len(history.rewards) > 1 and room >= 4:
        words.append(Text(sparkline(history.rewards[-room:]), style="cyan"))
    return Text(" ").join([*words, *evaluation])


def _speed(metrics: Metrics) -> str:
    parts = []
    if (value := metrics.get("time/step_s")) is not None:
        parts.append(f"{value:.1f} s/step")
    if (value := metrics.get("throughput/samples_per_s")) is not None:
        parts.append(f"{value:,.0f} samples/s")
    if (value := metrics.get("throughput/tokens_per_s")) is not None:
        parts.append(f"{value:,.0f} tokens/s")
    each = {int(found[1]): v for name, v in metrics.items() if (found := _ENGINE.fullmatch(name)) and v is not None}
    if each and parts:
        parts[-1] += f" (engines {', '.join(f'{each[number]:,.0f}' for number in sorted(each))})"
    return ", ".join(parts)


def _waits(report: ProgressReport) -> str:
    """Who is idle, and what limits the speed."""
    idle = [
        f"{who} {value:.0%}"
        for who in ("trainer", "engines")
        if (value := report.metrics.get(f"idle/{who}")) is not None
    ]
    verdict = report.limit.partition(":")[0] if idle else ""
    return "; ".join(part for part in (", ".join(idle) + " idle" if idle else "", verdict) if part)


def _stale(metrics: Metrics) -> str:
    parts = []
    if (value := metrics.get("staleness/mean")) is not None:
        most = metrics.get("staleness/max")
        parts.append(f"{value:.2f} versions" + ("" if most is None else f", at most {most:.0f}"))
    if (value := metrics.get("response/length_mean")) is not None:
        cut = metrics.get("response/truncated")
        parts.append(f"responses of {value:.1f} tokens" + ("" if not cut else f", {cut:.0%} cut"))
    return "; ".join(parts)


def _memory(metrics: Metrics) -> str:
    parts = [f"{who} {value:.1f}" for who in HOLDERS if (value := metrics.get(f"memory/{who}_gib")) is not None]
    free = metrics.get("memory/free_gib")
    return (", ".join(parts) + " GiB" if parts else "") + (f"; {free:.1f} GiB free" if free is not None else "")


def _sample(sample: Sample | None) -> str:
    if sample is None:
        return ""
    prompt, response = (" ".join(text.split()) for text in (sample.prompt, sample.response))
    prompt = prompt if cell_len(prompt) <= 40 else f"…{prompt[-39:]}"  # what is asked stands at the end
    return printable(f"{sample.reward:.2f}: {prompt} → {response}")


def _warnings(report: ProgressReport) -> str:
    count = f"({report.warnings}) " if report.warnings > 1 else ""
    return printable(count + " ".join(report.warning.split())) if report.warnings else ""


def printable(text: str) -> str:
    """Without what would move a terminal's cursor: a model may say anything."""
    return "".join(each if each.isprintable() else "·" for each in text)
