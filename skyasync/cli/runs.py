"""``skyasync runs [FOLDER]``: the runs of a folder, the newest first."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skyasync.cli.commands import Arguments, take_options
from skyasync.config.load import COMMAND_LINE
from skyasync.errors import UserError, unknown
from skyasync.observability import jsonl
from skyasync.observability.lines import duration
from skyasync.observability.report import settings
from skyasync.observability.run_dir import FAILED, FINISHED, LOST, RUNNING, STOPPED, read_status

HELP = """\
usage: skyasync runs [FOLDER] [--sort METRIC] [--best] [--json]

Lists the runs of a folder (by default runs), the newest first: plan, steps, held-out score (last and best), training
reward, time (since it was resumed, if it was) and state, and the settings in which they differ, those of the command
line first. A run is lost if its process ended without a reason.

--sort METRIC  the largest last value of a metric of metrics.jsonl first; shows the value
--best         only the first run of --sort, or without it the run with the best held-out score
--json         all settings that differ, for programs
"""
MOST = 4  # settings that the table shows; --json has them all
PLAN = "trainer.plan"
STEPS = "trainer.max_training_steps"
_SHOWN = (PLAN, STEPS)  # settings in columns of their own
_COLOURS = {RUNNING: "cyan", FINISHED: "green", STOPPED: "yellow", FAILED: "red", LOST: "red"}


@dataclass(frozen=True)
class Listed:
    """A run in the list; None is unknown.

    Args:
        of_steps: the steps that it will have.
        score: held-out score of the newest evaluation.
        seconds: of its last command, to its end or newest step.
        differs: settings in which the runs differ.
        sorted_by: value of the metric of ``--sort``.
    """

    name: str
    state: str
    plan: str = ""
    steps: int = 0
    of_steps: int | None = None
    score: float | None = None
    best_score: float | None = None
    reward: float | None = None
    seconds: float | None = None
    began: float = 0.0
    differs: dict[str, str] = field(default_factory=dict)
    sorted_by: float | None = None


def runs(argv: Arguments) -> None:
    """Print the table, or the list as JSON."""
    options, folders = take_options(argv, {"--sort": "reward/mean"}, ("--best", "--json"))
    if len(folders) > 1:
        raise UserError(f"skyasync runs lists one folder; {len(folders)} are named")
    metric = options.get("--sort", "")
    rows = listed(Path(folders[0] if folders else "runs"), metric)
    if "--best" in options:
        rows = [best(rows, metric)]
    if "--json" in options:
        print(json.dumps([asdict(run) for run in rows], indent=1))
    else:
        Console().print(table(rows, metric))


def best(runs: Sequence[Listed], metric: str = "") -> Listed:
    """The run with the best held-out score, or the first one of a list sorted by a metric.

    Raises:
        UserError: if no run has a held-out score.
    """
    if metric:
        return runs[0]
    scored_runs = [run for run in runs if run.best_score is not None]
    if not scored_runs:
        raise UserError(
            "--best: no run has a held-out score (data.val_data); name a metric with --sort"
        )
    return max(scored_runs, key=lambda run: run.best_score or 0.0)


def listed(folder: Path, metric: str = "") -> list[Listed]:
    """The runs in a folder, the newest first, or by their last values of a metric, largest first.

    Raises:
        UserError: if there is no such folder, no run in it, or no run that has the metric.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the one that trainer.runs_dir has")
    logs = ("config.yaml", "metrics.jsonl")
    paths = list[Path]()
    hidden_count = 0
    for path in folder.iterdir():
        try:
            if any((path / name).is_file() for name in logs):
                paths.append(path)
        except PermissionError:  # runs are private to their users; a folder may be shared
            hidden_count += 1
    if hidden_count:
        print(
            f"note: folders in {folder} that cannot be read: {hidden_count} (runs are private to their users)",
            file=sys.stderr,
        )
    if not paths:
        raise UserError(f"there is no run in {folder}: a run's folder has a config.yaml")
    values = []  # settings of each run
    rows = []  # metrics of each run
    metrics: set[str] = set()
    set_by_command: set[str] = set()
    for path in paths:
        values.append(settings.read(path / "config.yaml"))
        rows.append(jsonl.read_rows(path / "metrics.jsonl"))
        metrics.update(*rows[-1])
        for name, origin in settings.read_origins(path / "origins.json").items():
            if origin == COMMAND_LINE:
                set_by_command.add(name)
    if metric and metric not in metrics:
        raise UserError(f"--sort: {unknown('metric', metric, metrics)}")
    differing_settings = []
    for setting in settings.differing(values):
        if setting.key not in _SHOWN and not setting.key.endswith("path"):
            differing_settings.append(setting)
    # Settings of a command line first: a user varies these on purpose.
    differing_settings.sort(key=lambda setting: setting.key not in set_by_command)
    runs = []
    for index, path in enumerate(paths):
        differs = {setting.key: setting.values[index] for setting in differing_settings}
        runs.append(_listed(path, rows[index], values[index], differs, metric))
    runs.sort(key=_sort_key, reverse=True)
    return runs


def _sort_key(run: Listed) -> tuple[float, float]:
    """Sorts by the metric, if there is one, then by time; a run without a value comes last."""
    return (-inf if run.sorted_by is None else run.sorted_by, run.began)


def _listed(
    path: Path,
    rows: Sequence[jsonl.Row],
    values: settings.Values,
    differs: dict[str, str],
    metric: str,
) -> Listed:
    """A run of the list, from its files."""
    status = read_status(path)
    steps = [row for row in rows if row["step"] > 0]  # row 0 is the evaluation before training
    scores = _values(rows, "eval/score")
    rewards = _values(steps, "reward/mean")
    times = [row.get("time") for row in rows] or [None]
    start_s = status.began or times[0] or path.stat().st_mtime
    end_s = time.time() if status.state == RUNNING else status.ended or times[-1]
    if end_s and end_s < start_s:  # it was resumed, and lost before a step
        end_s = None
    return Listed(
        name=path.name,
        state=status.state,
        plan=str(values.get(PLAN, "")),
        steps=steps[-1]["step"] if steps else 0,
        of_steps=values.get(STEPS) or None,
        score=scores[-1] if scores else None,
        best_score=max(scores, default=None),
        reward=rewards[-1] if rewards else None,
        seconds=round(end_s - start_s, 1) if end_s else None,
        began=start_s,
        differs=differs,
        sorted_by=next(iter(_values(reversed(rows), metric)), None),
    )


def _values(rows: Iterable[jsonl.Row], metric: str) -> list[Any]:
    """The values of a metric, without rows that lack it or have null."""
    return [row[metric] for row in rows if row.get(metric) is not None]


def table(runs: Sequence[Listed], metric: str = "") -> Table:
    """The runs for a terminal.

    A user's plan is shown by its class, a setting by the last word of its key.
    """
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    result.add_column("run", overflow="fold")
    result.add_column("plan", overflow="fold")
    columns = ["steps", "score", "best", "reward"]
    if metric:
        columns.append(metric)
    for name in (*columns, "time"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("state", no_wrap=True)
    if any(run.differs for run in runs):
        result.add_column("settings that differ", overflow="fold")
    for run in runs:
        steps = f"{run.steps}/{run.of_steps}" if run.of_steps else str(run.steps)
        values = [run.score, run.best_score, run.reward]
        if metric:
            values.append(run.sorted_by)
        figures = ["-" if value is None else f"{value:.3f}" for value in values]
        duration_text = "-" if run.seconds is None else duration(run.seconds)
        state = Text(run.state, _COLOURS.get(run.state, "dim"))
        differs = []
        for key, value in islice(run.differs.items(), MOST):
            differs.append(f"{key.rpartition('.')[2]}={value}")
        if len(run.differs) > MOST:
            differs.append(f"and {len(run.differs) - MOST} more")
        plan = run.plan.rpartition(":")[2]
        # As text: rich would read brackets in a value as its own markup.
        result.add_row(
            run.name, plan, steps, *figures, duration_text, state, Text(" ".join(differs))
        )
    return result
