"""What a run achieved, where its time went, and what limits its speed.

Invariant: a pure function of the rows of ``metrics.jsonl``; figures that were not logged are left out, never
guessed. Shares and rates are weighted by the time of their steps, so that they hold for the whole run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from skyasync.observability import jsonl
from skyasync.observability.lines import duration

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

WAITS = ("wait_data", "wait_generation")
OVERHEADS = {"sync": "weight sync", "eval": "evaluation", "checkpoint": "saving checkpoints"}
AFTER_STEP = ("eval", "checkpoint")  # not counted in time/step_s
OVERHEAD_SHARE = 0.3  # an overhead is named as the limit when it takes more of the run than this
BALANCED = 0.1  # idle shares closer than this are called equal
FIGURES = (
    ("throughput/samples_per_s", "samples/s", "{:,.0f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
    ("staleness/mean", "mean staleness", "{:.2f}"),
    ("idle/trainer", "trainer idle", "{:.0%}"),
    ("idle/engines", "engines idle", "{:.0%}"),
    ("sync/logprob_gap", "largest log-prob gap", "{:.1e}"),
)


class Evaluation(NamedTuple):
    value: float
    step: int


@dataclass
class Summary:
    """The figures of one run; None or missing where nothing was logged. Times in seconds."""

    steps: int = 0
    total_s: float = 0.0
    step_s: float | None = None
    first: Evaluation | None = None
    last: Evaluation | None = None
    best: Evaluation | None = None
    phases: dict[str, float] = field(default_factory=dict)  # mean seconds per step, longest first
    means: dict[str, float] = field(default_factory=dict)
    limit: str = ""
    non_finite: int = 0


def summarise(rows: Sequence[Row]) -> Summary:
    """The summary of the rows of ``metrics.jsonl``; a step is a row that has ``time/step_s``."""
    steps = [row for row in rows if row.get("time/step_s") is not None]
    scores = [Evaluation(float(row["eval/score"]), row["step"]) for row in rows if row.get("eval/score") is not None]
    total = sum(float(row["time/step_s"]) for row in steps)
    names = {key for row in steps for key in row if key.startswith("time/") and key.endswith("_s")} - {"time/step_s"}
    phases = {name[5:-2]: sum(row.get(name) or 0.0 for row in steps) / len(steps) for name in names}
    means = {}  # over time of rates and shares, and over steps of staleness
    for name in ("throughput/samples_per_s", "throughput/tokens_per_s", "idle/trainer", "idle/engines"):
        weighted = [(row[name], row["time/step_s"]) for row in steps if row.get(name) is not None]
        if (time := sum(seconds for _, seconds in weighted)) > 0:
            means[name] = sum(value * seconds for value, seconds in weighted) / time
    if stale := [row["staleness/mean"] for row in steps if row.get("staleness/mean") is not None]:
        means["staleness/mean"] = sum(stale) / len(stale)
    if differences := [row["sync/logprob_gap"] for row in steps if row.get("sync/logprob_gap") is not None]:
        means["sync/logprob_gap"] = max(differences)
    summary = Summary(
        steps=len(steps),
        total_s=total,
        step_s=total / len(steps) if steps else None,
        first=scores[0] if scores else None,
        last=scores[-1] if scores else None,
        best=max(scores, key=lambda score: score.value, default=None),
        phases=dict(sorted(phases.items(), key=lambda item: (-item[1], item[0]))),
        means=means,
        non_finite=int(sum(row.get("warnings/non_finite") or 0 for row in rows)),
    )
    summary.limit = limit(summary)
    return summary


def limit(summary: Summary) -> str:
    """One sentence: what limits the speed, with the figures that say so."""
    if not summary.step_s:
        return "too few figures to say what limits the speed"
    part = {
        name: seconds / (summary.step_s + (seconds if name in AFTER_STEP else 0.0))
        for name, seconds in summary.phases.items()
    }
    name = max(OVERHEADS, key=lambda name: part.get(name, 0.0))
    trainer, engines = summary.means.get("idle/trainer"), summary.means.get("idle/engines")
    # Episodes were played and no engine worked: environments and rewards did.
    environments = 0.0 if engines is None else max(min(part.get("generate", 0.0), 1.0) - (1 - engines), 0.0)
    if OVERHEAD_SHARE < part.get(name, 0.0) >= environments:
        return f"{OVERHEADS[name]} is the bottleneck: it took {part[name]:.0%} of the time"
    overlapping = any(name in part for name in WAITS)  # the plan lets both work at once: its trainer waits for data
    if trainer is None and overlapping:
        trainer = sum(part.get(name, 0.0) for name in WAITS)
    if trainer is None:
        return "too few figures to say what limits the speed"
    if engines is None:
        bottleneck = "generation" if trainer > 0.5 else "training"
        return f"{bottleneck} is the bottleneck: the trainer waited {trainer:.0%} of the time"
    if environments > max(1 - trainer, 1 - engines):
        return (
            f"environments and reward functions are the bottleneck: episodes waited for them in {environments:.0%} "
            f"of the time, the engines worked {1 - engines:.0%} of it, the trainer {1 - trainer:.0%}; faster ones, or "
            f"more processes for them (environment.num_workers), would help"
        )
    idle = f"the trainer waited {trainer:.0%} of the time, the engines {engines:.0%}"
    if not overlapping and (neither := trainer + engines - 1) > max(1 - trainer, 1 - engines):
        return (
            f"neither trainer nor engines worked for {neither:.0%} of the time ({idle}): the controller, environments "
            f"and reward functions did; an asynchronous plan would overlap them"
        )
    if trainer + engines >= 0.9 and min(trainer, engines) > BALANCED:
        if overlapping:
            return (
                f"trainer and engines mostly wait for each other, though the plan lets them overlap: {idle}; "
                f"generating further ahead (trainer.max_staleness, trainer.async_queue_size) would help"
            )
        longer = "training" if engines > trainer else "generation"
        return f"trainer and engines take turns, {longer} longer: {idle}; an asynchronous plan would overlap them"
    if abs(trainer - engines) < BALANCED:
        return f"generation and training are balanced: {idle}"
    bottleneck, cure = ("generation", "engines") if trainer > engines else ("training", "the trainer")
    return f"{bottleneck} is the bottleneck: {idle}; more devices for {cure} would help"


def render(summary: Summary) -> Group:
    """The summary for a terminal: figures, the breakdown of a step, the sentence."""
    lines = []
    if summary.first and summary.last and summary.best:
        first, last, best = summary.first, summary.last, summary.best
        scores = f"{first.value:.2f} (step {first.step}) → {last.value:.2f} (step {last.step})"
        lines.append(("held-out score", f"{scores}, best {best.value:.2f} (step {best.step})"))
    if summary.step_s is not None:
        lines.append(("steps", f"{summary.steps} in {duration(summary.total_s)}, {summary.step_s:.2f} s each"))
    lines += [(label, form.format(summary.means[name])) for name, label, form in FIGURES if name in summary.means]
    if summary.non_finite:
        lines.append(("not finite", f"{summary.non_finite} values were NaN or infinite"))
    figures = Table.grid(padding=(0, 2))
    for name, text in lines:
        figures.add_row(Text(name, style="bold"), Text(text))
    parts: list[Table | Text] = [figures]
    if summary.phases and summary.step_s:
        # Phases nest (an update is a part of training), and in asynchronous plans they overlap.
        title = "where a step's time goes (phases nest and overlap: shares do not add up to 100%)"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("phase")
        table.add_column("seconds", justify="right")
        table.add_column("of a step", justify="right")
        for name, seconds in summary.phases.items():
            table.add_row(name.replace("_", " "), f"{seconds:.3f}", f"{seconds / summary.step_s:.0%}")
        parts += [Text(), table]
    return Group(*parts, Text(), Text(summary.limit, style="bold cyan"))


def print_summary(metrics_path: Path | str) -> bool:
    """Print the summary of one ``metrics.jsonl``; False if it has no rows or cannot be summed up (a warning)."""
    try:
        rows = jsonl.read_rows(metrics_path)
        if rows:
            Console().print(render(summarise(rows)))
    except Exception as error:  # the run is over; its own outcome must be what the user sees
        logger.warning("no summary of %s: %s: %s", metrics_path, type(error).__name__, error)
        return False
    return bool(rows)
