"""The live view's panel: what a report says, in as many lines as fit.

Invariant: a pure function of the report, the history and the size. No line is longer than the terminal is wide, none
wraps, and what matters least is left out first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from skyasync.observability.lines import Metrics, duration
from skyasync.observability.progress import ProgressReport

BARS = "▁▂▃▄▅▆▇█"
HOLDERS = ("controller", "workers", "engines", "environments")
LABEL = 8  # columns of a row's name
LEAST_WIDTH = 20  # below it names are left out
FIRST_OUT = ("memory", "sample", "stale", "speed", "waits", "loss", "reward", "warning")  # of a small terminal
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
    rows = {"reward": _reward(report.metrics, history, width)}
    rows |= {name: Text(text) for name, text in _rows(report).items()}
    shown = [name for name, text in rows.items() if text.plain]
    for name in FIRST_OUT:
        if len(shown) > max(0, height - 2) and name in shown:
            shown.remove(name)
    lines = [_head(report, width)]
    for name in shown:
        style = "yellow" if name == "warning" else "dim"
        label = Text(f"{name:<{LABEL}}", style) if width >= LEAST_WIDTH else Text()
        lines.append(Text.assemble(label, rows[name]))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines


def _head(report: ProgressReport, width: int) -> Text:
    """``step 12/80 ━━━━━━────── 0:42, 1:53 left, training``; the bar takes what the words leave."""
    line = Text(f"step {report.step}/{report.total}" if report.total else report.phase, style="bold")
    left = "" if report.eta_s is None or report.step >= report.total else f", {duration(report.eta_s)} left"
    words = f" {duration(report.elapsed_s)}{left}"
    phase = f", {report.phase}" if report.total and report.phase else ""
    free = min(30, width - cell_len(line.plain) - cell_len(words + phase) - 1)
    if report.total and free >= 8:
        done = round(free * min(1.0, report.step / report.total))
        line.append(" ")
        line.append("━" * done, style="green")
        line.append("─" * (free - done), style="dim")
    return line.append(words).append(phase, style="dim")


def _reward(metrics: Metrics, history: History, width: int) -> Text:
    """The mean reward, its course, the score: the course takes what the words leave."""
    value, score = metrics.get("reward/mean"), metrics.get("eval/score")
    words = [] if value is None else [Text(f"{value:.2f}")]
    best = "" if history.best is None else f", best {history.best:.2f} at step {history.best_step}"
    evaluation = [] if score is None else [Text(f"eval {score:.2f}{best}", style="green")]
    free = min(60, width - LABEL - sum(cell_len(text.plain) + 2 for text in words + evaluation))
    if len(history.rewards) > 1 and free >= 4:
        words.append(Text(sparkline(history.rewards[-free:]), style="cyan"))
    return Text(" ").join([*words, *evaluation])


def _rows(report: ProgressReport) -> dict[str, str]:
    """Each row's text, empty if nothing is known of it."""
    metrics = report.metrics
    speed = [
        form.format(value)
        for name, form in (
            ("time/step_s", "{:.1f} s/step"),
            ("throughput/samples_per_s", "{:,.0f} samples/s"),
            ("throughput/tokens_per_s", "{:,.0f} tokens/s"),
        )
        if (value := metrics.get(name)) is not None
    ]
    engines = {int(match[1]): v for name, v in metrics.items() if (match := _ENGINE.fullmatch(name)) and v is not None}
    if engines and speed:
        speed[-1] += f" (engines {', '.join(f'{engines[number]:,.0f}' for number in sorted(engines))})"
    shares = [(who, metrics.get(f"idle/{who}")) for who in ("trainer", "engines")]
    idle = ", ".join(f"{who} {value:.0%}" for who, value in shares if value is not None)
    waits = [f"{idle} idle", report.limit.partition(":")[0]] if idle else []
    stale = []
    if (value := metrics.get("staleness/mean")) is not None:
        most = metrics.get("staleness/max")
        stale.append(f"{value:.2f} versions" + ("" if most is None else f", at most {most:.0f}"))
    if (value := metrics.get("response/length_mean")) is not None:
        cut = metrics.get("response/truncated")
        stale.append(f"responses of {value:.1f} tokens" + ("" if not cut else f", {cut:.0%} cut"))
    holders = [f"{who} {value:.1f}" for who in HOLDERS if (value := metrics.get(f"memory/{who}_gib")) is not None]
    memory, free = ", ".join(holders) + " GiB" if holders else "", metrics.get("memory/free_gib")
    sample = ""
    if report.sample is not None:
        prompt, response = (" ".join(text.split()) for text in (report.sample.prompt, report.sample.response))
        prompt = prompt if cell_len(prompt) <= 40 else f"…{prompt[-39:]}"  # the question stands at the end
        sample = f"{report.sample.reward:.2f}: {prompt} → {response}"
    count = f"({report.warnings}) " if report.warnings > 1 else ""
    losses = (("sft/loss", "{:.3f}"), ("eval/loss", "held-out {:.3f}"))
    return {
        "loss": ", ".join(form.format(v) for name, form in losses if (v := metrics.get(name)) is not None),
        "speed": ", ".join(speed),
        "waits": "; ".join(part for part in waits if part),
        "stale": "; ".join(stale),
        "memory": memory + (f"; {free:.1f} GiB free" if free is not None else ""),
        "sample": printable(sample),
        "warning": printable(count + " ".join(report.warning.split())) if report.warnings else "",
    }


def printable(text: str) -> str:
    """Without what would move a terminal's cursor: a model may say anything."""
    return "".join(each if each.isprintable() else "·" for each in text)
