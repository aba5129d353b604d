"""Summary of a run: its scores, where its time went, and what limits its speed.

Invariant: a pure function of the rows of ``metrics.jsonl``; figures that were not logged are left
out, never guessed. Shares and rates are weighted by the time of their steps, so that they hold for
the whole run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
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
NO_PHASES = {"time/step_s", "time/interval_s", "time/start_s"}  # times that are no phase of a step
RATES = ("throughput/samples_per_s", "throughput/tokens_per_s", "idle/trainer", "idle/engines")
OVERHEAD_SHARE = 0.3  # an overhead is named as the limit when it takes more of the run than this
BALANCED = 0.1  # idle shares closer than this are called equal
MOSTLY_BUSY = 0.25  # the trainer or engines limit nothing if they are idle for longer than this
TAKING_TURNS = 0.9  # idle shares that add up to this: one works while the other waits
#: A mean, its label, and how it reads, in the order of the lines.
FIGURES = (
    ("throughput/samples_per_s", "samples/s", "{:,.0f}"),
    ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
    ("staleness/mean", "mean staleness", "{:.2f}"),
    ("idle/trainer", "trainer idle", "{:.0%}"),
    ("idle/engines", "engines idle", "{:.0%}"),
    ("sync/logprob_gap", "largest log-prob gap", "{:.1e}"),
)


class Evaluation(NamedTuple):
    """A score of the held-out prompts, after the training step ``step``."""

    value: float
    step: int


@dataclass
class Summary:
    """The figures of one run; None or missing where nothing was logged. Times in seconds.

    Attributes:
        start_s: from the start of the program to the first step.
        total_s: of training: the steps, and the evaluations, checkpoints and exports between them.
        step_s: of a step, on average over steps without an evaluation in their time, or over all if
            there are none.
        between: the time in ``total_s`` outside of steps, by name.
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
    steps = jsonl.rows_with(rows, "time/step_s")
    scores = []
    for row in jsonl.rows_with(rows, "eval/score"):
        scores.append(Evaluation(float(row["eval/score"]), row["step"]))
    between = {}
    for name, label in BETWEEN_STEPS.items():
        seconds = _total(steps, f"time/{name}_s")
        if seconds:
            between[label] = seconds
    summary = Summary(
        steps=len(steps),
        total_s=_total(steps, "time/step_s") + sum(between.values()),
        between=between,
        phases=_phases(steps),
        means=_means(steps),
        non_finite=int(_total(rows, "warnings/non_finite")),
    )
    if scores:
        summary.first = scores[0]
        summary.last = scores[-1]
        summary.best = max(scores, key=lambda score: score.value)
    starts = jsonl.rows_with(steps, "time/start_s")
    if starts:
        summary.start_s = starts[0]["time/start_s"]
    if steps:
        undisturbed = _undisturbed(rows)
        timed = undisturbed or steps
        summary.step_s = _total(timed, "time/step_s") / len(timed)
        samples = _samples(steps)
        # Samples per second are of the whole time of training, as its duration is.
        if samples and summary.total_s > 0:
            summary.means["throughput/samples_per_s"] = samples / summary.total_s
        if samples and undisturbed and "evaluation" in between:
            seconds = max(sum(map(_interval_s, undisturbed)), 1e-9)
            summary.samples_per_s = _samples(undisturbed) / seconds
    summary.limit = limit(summary)
    return summary


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(jsonl.values_of(rows, name))


def _interval_s(row: Row) -> float:
    """The time in which the counters of a row counted."""
    seconds = row.get("time/interval_s")
    if seconds is None:  # not logged: the time of the step is nearest to it
        seconds = row["time/step_s"]
    return float(seconds)


def _samples(rows: Sequence[Row]) -> float:
    """Number of samples that these steps trained."""
    return _integral(jsonl.rows_with(rows, "throughput/samples_per_s"), "throughput/samples_per_s")


def _integral(rows: Sequence[Row], rate: str) -> float:
    """A rate times the seconds for which it was measured, summed over rows that all have it."""
    return sum(row[rate] * _interval_s(row) for row in rows)


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
    names: set[str] = set()
    for row in steps:
        names.update(row)
    phases = {}
    for name in names - NO_PHASES:
        if name.startswith("time/") and name.endswith("_s"):
            phase = name.removeprefix("time/").removesuffix("_s")
            phases[phase] = _total(steps, name) / len(steps)
    return dict(sorted(phases.items(), key=lambda item: (-item[1], item[0])))


def _means(steps: Sequence[Row]) -> dict[str, float]:
    """Means of rates and shares over time and of the staleness over steps.

    Of the log-probability differences it is the largest.
    """
    means = {}
    for name in RATES:
        measured = jsonl.rows_with(steps, name)
        seconds = sum(map(_interval_s, measured))
        if seconds > 0:
            means[name] = _integral(measured, name) / seconds
    staleness = jsonl.values_of(steps, "staleness/mean")
    if staleness:
        means["staleness/mean"] = sum(staleness) / len(staleness)
    differences = jsonl.values_of(steps, "sync/logprob_gap")
    if differences:
        means["sync/logprob_gap"] = max(differences)
    return means


def limit(summary: Summary) -> str:
    """One sentence: what limits the speed, with the figures that say so."""
    if not summary.total_s:
        return "too few figures to say what limits the speed"
    phase_shares = {}
    for name, seconds in summary.phases.items():
        phase_shares[name] = seconds * summary.steps / summary.total_s
    overhead = max(OVERHEADS, key=lambda name: phase_shares.get(name, 0.0))
    overhead_share = phase_shares.get(overhead, 0.0)
    trainer = summary.means.get("idle/trainer")
    engines = summary.means.get("idle/engines")
    environments = 0.0
    if engines is not None:
        # Episodes were played and no engine worked: environments and rewards did.
        generation = min(phase_shares.get("generate", 0.0), 1.0)
        environments = max(generation - (1 - engines), 0.0)
    if OVERHEAD_SHARE < overhead_share >= environments:
        return f"{OVERHEADS[overhead]} is the bottleneck: it took {overhead_share:.0%} of the time"
    wait_phases = [name for name in WAITS if name in phase_shares]
    # The trainer of a plan that lets both work at once waits for data.
    overlapping = bool(wait_phases)
    waits = sum(phase_shares[name] for name in wait_phases)
    if trainer is None and overlapping:
        trainer = waits
    if trainer is None:
        return "too few figures to say what limits the speed"
    if engines is None:
        bottleneck = "generation" if trainer > 0.5 else "training"
        return f"{bottleneck} is the bottleneck: the trainer waited {trainer:.0%} of the time"
    busier = max(1 - trainer, 1 - engines)
    if environments > busier:
        return (
            f"environments and reward functions are the bottleneck: episodes waited for them in {environments:.0%} "
            f"of the time, the engines worked {1 - engines:.0%} of it, the trainer {1 - trainer:.0%}; faster ones, or "
            f"more processes for them (environment.num_workers), would help"
        )
    idle = f"the trainer waited {trainer:.0%} of the time, the engines {engines:.0%}"
    # Without overlap at most one works at a time: the rest of the time is of neither.
    neither = trainer + engines - 1
    if not overlapping and neither > busier:
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
    if not overlapping and trainer + engines >= TAKING_TURNS and min(trainer, engines) > BALANCED:
        longer = "training" if engines > trainer else "generation"
        return f"trainer and engines take turns, {longer} longer: {idle}; an asynchronous plan would overlap them"
    if abs(trainer - engines) < BALANCED:
        return f"generation and training are balanced: {idle}"
    if trainer > engines:
        return f"generation is the bottleneck: {idle}; more devices for engines would help"
    return f"training is the bottleneck: {idle}; more devices for the trainer would help"


def course(summary: Summary) -> str:
    """``2:26 (evaluation 0:19, checkpoints 0:02), 1.60 s each without evaluations``."""
    assert summary.step_s is not None, "a run without steps has no course"
    words = duration(summary.total_s)
    if summary.between:
        words += f" ({_durations(summary.between.items())})"
    words += f", {summary.step_s:.2f} s each"
    if "evaluation" in summary.between:
        words += " without evaluations"
    return words


def _durations(spans: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in spans)


def _figure(summary: Summary, name: str, form: str) -> str:
    """A mean as text; samples per second are followed by the rate without evaluations."""
    text = form.format(summary.means[name])
    if name == "throughput/samples_per_s" and summary.samples_per_s is not None:
        text += f" ({form.format(summary.samples_per_s)} without evaluations)"
    return text


def run_times(rows: Sequence[Row], ended_s: float) -> str:
    """``start 0:34, 30 steps 1:11, evaluation 0:14, finish 0:09``; "" for a run without steps.

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
    # The evaluation before the first step has a row of its own, which is no step.
    baseline_rows = [row for row in rows if row.get("time/step_s") is None]
    baseline_s = _total(baseline_rows, "time/eval_s")
    between = dict(summary.between)
    if baseline_s:
        between["evaluation"] = between.get("evaluation", 0.0) + baseline_s
    spans += between.items()
    spans.append(("finish", ended_s - rows[-1]["time"]))
    return _durations(spans)


def render(summary: Summary, run_alarms: Sequence[Alarm] = ()) -> Group:
    """The summary for a terminal: figures, phases of a step, alarms, and the limit of the speed.

    The speed of a run that learns nothing is left out.
    """
    lines = []
    if summary.first and summary.last and summary.best:
        scores = f"{_score(summary.first)} → {_score(summary.last)}, best {_score(summary.best)}"
        lines.append(("held-out score", scores))
    if summary.start_s is not None:
        lines.append(("start", duration(summary.start_s)))
    if summary.step_s is not None:
        lines.append(("steps", f"{summary.steps} in {course(summary)}"))
    for name, label, form in FIGURES:
        if name in summary.means:
            lines.append((label, _figure(summary, name, form)))
    if summary.non_finite:
        lines.append(("not finite", f"{summary.non_finite} values were NaN or infinite"))
    figures = Table.grid(padding=(0, 2))
    for label, text in lines:
        figures.add_row(Text(label, style="bold"), Text(text))
    blocks: list[Table | Text] = [figures]
    if summary.phases and summary.total_s:
        blocks += [Text(), _phase_table(summary)]
    for line in alarm_lines(run_alarms):
        blocks += [Text(), Text(line, style="bold yellow")]
    if not any(alarm.nothing_learned for alarm in run_alarms):
        blocks += [Text(), Text(summary.limit, style="bold cyan")]
    return Group(*blocks)


def _phase_table(summary: Summary) -> Table:
    # Phases nest (an update is a part of training), and in asynchronous plans they overlap.
    title = (
        "where the time of training goes (phases nest and overlap: shares do not add up to 100%)"
    )
    table = Table(
        title=title,
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("phase")
    table.add_column("seconds per step", justify="right")
    table.add_column("of the time", justify="right")
    for name, seconds in summary.phases.items():
        share = seconds * summary.steps / summary.total_s
        table.add_row(name.replace("_", " "), f"{seconds:.3f}", f"{share:.0%}")
    return table


def _score(evaluation: Evaluation) -> str:
    return f"{evaluation.value:.2f} (step {evaluation.step})"


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
