"""What a run achieved, where its time went, and what limits its speed.

Invariant: a pure function of the rows of ``metrics.jsonl``; figures that were not logged are left
out, never guessed. Shares and rates are weighted by the time of their steps, so that they hold for
the whole run.
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
from skyasync.observability.alarms import RESTARTS, Alarm, alarm_lines, alarms
from skyasync.observability.lines import duration

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]

WAITS = ("wait_data", "wait_generation")
OVERHEADS = {"sync": "weight sync", "eval": "evaluation", "checkpoint": "saving checkpoints"}
#: Phases that time/step_s leaves out, and their names in the line of the steps.
BETWEEN_STEPS = {"eval": "evaluation", "checkpoint": "checkpoints", "export": "exports"}
NO_PHASES = {"time/step_s", "time/interval_s", "time/start_s"}
RATES = ("throughput/samples_per_s", "throughput/tokens_per_s", "idle/trainer", "idle/engines")
OVERHEAD_SHARE = 0.3  # an overhead is named as the limit when it takes more of the run than this
BALANCED = 0.1  # idle shares closer than this are called equal
MOSTLY_BUSY = 0.25  # a part that is idle for longer than this limits nothing
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
    """The figures of one run; None or missing where nothing was logged. Times in seconds.

    Attributes:
        total_s: of training: the steps, and the evaluations, checkpoints and exports between them.
        step_s: of a step, on average over steps without an evaluation in their time, or over all if
            there are none.
        between: the parts of ``total_s`` that are no steps, by name.
        samples_per_s: without evaluations; None if there were none, or in all steps.
    """

    steps: int = 0
    start_s: float | None = None
    total_s: float = 0.0
    step_s: float | None = None
    between: dict[str, float] = field(default_factory=dict)
    samples_per_s: float | None = None
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
    scores = [
        Evaluation(float(row["eval/score"]), row["step"])
        for row in rows
        if row.get("eval/score") is not None
    ]
    between = {}
    for name, label in BETWEEN_STEPS.items():
        seconds = _total(steps, f"time/{name}_s")
        if seconds:
            between[label] = seconds
    starts = [row["time/start_s"] for row in steps if row.get("time/start_s") is not None]
    summary = Summary(
        steps=len(steps),
        start_s=starts[0] if starts else None,
        total_s=_total(steps, "time/step_s") + sum(between.values()),
        between=between,
        first=scores[0] if scores else None,
        last=scores[-1] if scores else None,
        best=max(scores, key=lambda score: score.value, default=None),
        phases=_phases(steps),
        means=_means(steps),
        non_finite=int(sum(row.get("warnings/non_finite") or 0 for row in rows)),
    )
    if steps:
        undisturbed = _undisturbed(rows)
        counted = undisturbed or steps
        summary.step_s = _total(counted, "time/step_s") / len(counted)
        samples = _samples(steps)
        if samples and summary.total_s > 0:
            summary.means["throughput/samples_per_s"] = samples / summary.total_s
        if samples and undisturbed and "evaluation" in between:
            summary.samples_per_s = _samples(undisturbed) / max(
                sum(map(_interval_s, undisturbed)), 1e-9
            )
    summary.limit = limit(summary)
    return summary


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(float(row.get(name) or 0.0) for row in rows)


def _interval_s(row: Row) -> float:
    """The time in which the counters of a row counted."""
    seconds = row.get("time/interval_s")
    return float(row["time/step_s"] if seconds is None else seconds)


def _samples(rows: Sequence[Row]) -> float:
    """How many samples these steps trained."""
    return sum((row.get("throughput/samples_per_s") or 0.0) * _interval_s(row) for row in rows)


def _undisturbed(rows: Sequence[Row]) -> list[Row]:
    """Steps with no evaluation in their time, and whose samples were not generated during one.

    An evaluation follows the step in whose row it is, so it is in the time of the next one.
    """
    steps = []
    evaluated = False
    for row in rows:
        if row.get("time/step_s") is not None:
            if not evaluated and not row.get("rollout/in_evaluation"):
                steps.append(row)
            evaluated = row.get("time/eval_s") is not None
    return steps


def _phases(steps: Sequence[Row]) -> dict[str, float]:
    """Mean seconds per step of each phase, the longest first."""
    names = {
        key for row in steps for key in row if key.startswith("time/") and key.endswith("_s")
    } - NO_PHASES
    phases = {name[5:-2]: _total(steps, name) / len(steps) for name in names}
    return dict(sorted(phases.items(), key=lambda item: (-item[1], item[0])))


def _means(steps: Sequence[Row]) -> dict[str, float]:
    """Rates and shares over time, staleness over steps; of log-probability differences the
    largest."""
    means = {}
    for name in RATES:
        measured = [row for row in steps if row.get(name) is not None]
        seconds = sum(map(_interval_s, measured))
        if seconds > 0:
            means[name] = sum(row[name] * _interval_s(row) for row in measured) / seconds
    staleness = [row["staleness/mean"] for row in steps if row.get("staleness/mean") is not None]
    if staleness:
        means["staleness/mean"] = sum(staleness) / len(staleness)
    differences = [
        row["sync/logprob_gap"] for row in steps if row.get("sync/logprob_gap") is not None
    ]
    if differences:
        means["sync/logprob_gap"] = max(differences)
    return means


def limit(summary: Summary) -> str:
    """One sentence: what limits the speed, with the figures that say so."""
    if not summary.total_s:
        return "too few figures to say what limits the speed"
    part = {
        name: seconds * summary.steps / summary.total_s for name, seconds in summary.phases.items()
    }
    name = max(OVERHEADS, key=lambda name: part.get(name, 0.0))
    trainer = summary.means.get("idle/trainer")
    engines = summary.means.get("idle/engines")
    # Episodes were played and no engine worked: environments and rewards did.
    if engines is None:
        environments = 0.0
    else:
        environments = max(min(part.get("generate", 0.0), 1.0) - (1 - engines), 0.0)
    if OVERHEAD_SHARE < part.get(name, 0.0) >= environments:
        return f"{OVERHEADS[name]} is the bottleneck: it took {part[name]:.0%} of the time"
    overlapping = any(
        name in part for name in WAITS
    )  # the plan lets both work at once: its trainer waits for data
    waits = sum(part.get(name, 0.0) for name in WAITS)
    if trainer is None and overlapping:
        trainer = waits
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
    neither_limits = min(trainer, engines) > MOSTLY_BUSY
    if overlapping and neither_limits and waits < trainer / 2:
        return (
            f"neither trainer nor engines are the bottleneck: {idle}; the controller, environments and reward "
            f"functions took much of the time: the trainer waited for samples in {waits:.0%} of it"
        )
    if overlapping and neither_limits:
        return (
            f"trainer and engines wait for each other, though the plan lets them overlap: {idle}; "
            f"generating further ahead (trainer.max_staleness, trainer.async_queue_size) would help"
        )
    if not overlapping and trainer + engines >= 0.9 and min(trainer, engines) > BALANCED:
        longer = "training" if engines > trainer else "generation"
        return f"trainer and engines take turns, {longer} longer: {idle}; an asynchronous plan would overlap them"
    if abs(trainer - engines) < BALANCED:
        return f"generation and training are balanced: {idle}"
    bottleneck, cure = (
        ("generation", "engines") if trainer > engines else ("training", "the trainer")
    )
    return f"{bottleneck} is the bottleneck: {idle}; more devices for {cure} would help"


def course(summary: Summary) -> str:
    """``2:26 (evaluation 0:19, checkpoints 0:02), 1.60 s each without evaluations``."""
    assert summary.step_s is not None, "a run without steps has no course"
    between = ", ".join(f"{name} {duration(seconds)}" for name, seconds in summary.between.items())
    words = duration(summary.total_s)
    if between:
        words += f" ({between})"
    words += f", {summary.step_s:.2f} s each"
    return words + (" without evaluations" if "evaluation" in summary.between else "")


def _figure(summary: Summary, name: str, form: str) -> str:
    """A mean as text. Samples per second are of all of training, with the rate without evaluations
    after it."""
    text = form.format(summary.means[name])
    if name == "throughput/samples_per_s" and summary.samples_per_s is not None:
        text += f" ({form.format(summary.samples_per_s)} without evaluations)"
    return text


def run_times(rows: Sequence[Row], ended_s: float) -> str:
    """``start 0:34, 30 steps 1:11, evaluation 0:14, finish 0:09``: the seconds of a run; "" if it
    has no steps.

    Args:
        rows: of one run of a program; without those before a resume.
        ended_s: when everything had ended, in seconds since 1970 as in the rows' ``time``.
    """
    summary = summarise(rows)
    if not summary.steps:
        return ""
    spans: list[tuple[str, float]] = []
    if summary.start_s is not None:
        spans.append(("start", summary.start_s))
    spans.append((f"{summary.steps} steps", summary.total_s - sum(summary.between.values())))
    before_s = _total([row for row in rows if row.get("time/step_s") is None], "time/eval_s")
    between = dict(summary.between)
    if before_s:
        between["evaluation"] = between.get("evaluation", 0.0) + before_s
    spans += between.items()
    spans.append(("finish", ended_s - rows[-1]["time"]))
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in spans)


def render(summary: Summary, run_alarms: Sequence[Alarm] = ()) -> Group:
    """The summary for a terminal: figures, the breakdown of a step, alarms, and what limits the
    speed.

    The speed of a run that learns nothing is left out.
    """
    lines = []
    if summary.first and summary.last and summary.best:
        first = summary.first
        last = summary.last
        best = summary.best
        scores = f"{first.value:.2f} (step {first.step}) → {last.value:.2f} (step {last.step})"
        lines.append(("held-out score", f"{scores}, best {best.value:.2f} (step {best.step})"))
    if summary.start_s is not None:
        lines.append(("start", duration(summary.start_s)))
    if summary.step_s is not None:
        lines.append(("steps", f"{summary.steps} in {course(summary)}"))
    lines += [
        (label, _figure(summary, name, form))
        for name, label, form in FIGURES
        if name in summary.means
    ]
    if summary.non_finite:
        lines.append(("not finite", f"{summary.non_finite} values were NaN or infinite"))
    figures = Table.grid(padding=(0, 2))
    for name, text in lines:
        figures.add_row(Text(name, style="bold"), Text(text))
    parts: list[Table | Text] = [figures]
    if summary.phases and summary.total_s:
        # Phases nest (an update is a part of training), and in asynchronous plans they overlap.
        title = "where the time of training goes (phases nest and overlap: shares do not add up to 100%)"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("phase")
        table.add_column("seconds per step", justify="right")
        table.add_column("of the time", justify="right")
        for name, seconds in summary.phases.items():
            share = seconds * summary.steps / summary.total_s
            table.add_row(name.replace("_", " "), f"{seconds:.3f}", f"{share:.0%}")
        parts += [Text(), table]
    for line in alarm_lines(run_alarms):
        parts += [Text(), Text(line, style="bold yellow")]
    if not any(alarm.nothing_learned for alarm in run_alarms):
        parts += [Text(), Text(summary.limit, style="bold cyan")]
    return Group(*parts)


def print_summary(metrics_path: Path | str) -> bool:
    """Print the summary of one ``metrics.jsonl``, with the run's alarms.

    Returns:
        False if it has no rows or cannot be summed up (a warning).
    """
    try:
        rows = jsonl.read_rows(metrics_path)
        if rows:
            restarts = jsonl.read_rows(Path(metrics_path).with_name(RESTARTS))
            Console().print(render(summarise(rows), alarms(rows, restarts)))
    except Exception as error:  # the run is over; its own outcome must be what the user sees
        logger.warning("no summary of %s: %s: %s", metrics_path, type(error).__name__, error)
        return False
    return bool(rows)
