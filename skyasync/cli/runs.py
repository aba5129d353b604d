"""``skyasync runs [FOLDER]``: the runs of a folder, the newest first."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import inf
from pathlib import Path

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
_SHOWN = (PLAN, STEPS)  # in columns of their own
_COLOURS = {RUNNING: "cyan", FINISHED: "green", STOPPED: "yellow", FAILED: "red", LOST: "red"}


@dataclass(frozen=True)
class Listed:
    """A run in the list; None is unknown. ``seconds`` are those of its last command, to its end or
    newest step."""

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
    rows = listed(Path(folders[0] if folders else "runs"), options.get("--sort", ""))
    if "--best" in options:
        rows = [best(rows, options.get("--sort", ""))]
    if "--json" in options:
        print(json.dumps([asdict(run) for run in rows], indent=1))
    else:
        Console().print(table(rows, options.get("--sort", "")))


def best(runs: Sequence[Listed], metric: str = "") -> Listed:
    """The run with the largest value of the metric that they are sorted by, or with the best
    held-out score.

    Raises:
        UserError: if no run has a held-out score.
    """
    if metric:
        return runs[0]
    scored = [run for run in runs if run.best_score is not None]
    if not scored:
        raise UserError(
            "--best: no run has a held-out score (data.val_data); name a metric with --sort"
        )
    return max(scored, key=lambda run: run.best_score or 0.0)


def listed(folder: Path, metric: str = "") -> list[Listed]:
    """The runs in a folder, the newest first, or the one with the largest last value of a metric.

    Raises:
        UserError: if there is no such folder, no run in it, or no run that has the metric.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the one that trainer.runs_dir has")
    logs = ("config.yaml", "metrics.jsonl")
    paths = list[Path]()
    hidden = 0
    for path in folder.iterdir():
        try:
            paths += [path] if any((path / name).is_file() for name in logs) else []
        except PermissionError:
            hidden += 1
    if hidden:
        print(
            f"note: folders in {folder} that cannot be read: {hidden} (runs are private to their users)",
            file=sys.stderr,
        )
    if not paths:
        raise UserError(f"there is no run in {folder}: a run's folder has a config.yaml")
    rows = [jsonl.read_rows(path / "metrics.jsonl") for path in paths]
    if metric and metric not in (known := {name for own in rows for row in own for name in row}):
        raise UserError(f"--sort: {unknown('metric', metric, known)}")
    values = [settings.read(path / "config.yaml") for path in paths]
    set_here = {
        name
        for path in paths
        for name, who in settings.read_origins(path / "origins.json").items()
        if who == COMMAND_LINE
    }
    differing = [
        s for s in settings.differing(values) if s.key not in _SHOWN and not s.key.endswith("path")
    ]
    differing.sort(key=lambda setting: setting.key not in set_here)
    runs = [
        _listed(path, own, cfg, {s.key: s.values[place] for s in differing}, metric)
        for place, (path, own, cfg) in enumerate(zip(paths, rows, values, strict=True))
    ]
    return sorted(
        runs,
        key=lambda run: (-inf if run.sorted_by is None else run.sorted_by, run.began),
        reverse=True,
    )


def _listed(
    path: Path,
    rows: Sequence[jsonl.Row],
    values: settings.Values,
    differs: dict[str, str],
    metric: str,
) -> Listed:
    status = read_status(path)
    steps = [row for row in rows if row["step"] > 0]
    scores = [row["eval/score"] for row in rows if row.get("eval/score") is not None]
    rewards = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
    last = rows[-1].get("time") if rows else None
    began = status.began or (rows[0].get("time") if rows else None) or path.stat().st_mtime
    ended = time.time() if status.state == RUNNING else status.ended or last
    if ended and ended < began:  # it was resumed, and lost before a step
        ended = None
    return Listed(
        name=path.name,
        state=status.state,
        plan=str(values.get(PLAN, "")),
        steps=steps[-1]["step"] if steps else 0,
        of_steps=values.get(STEPS) or None,
        score=scores[-1] if scores else None,
        best_score=max(scores, default=None),
        reward=rewards[-1] if rewards else None,
        seconds=round(ended - began, 1) if ended else None,
        began=began,
        differs=differs,
        sorted_by=next(
            (row[metric] for row in reversed(rows) if row.get(metric) is not None), None
        ),
    )


def table(runs: Sequence[Listed], metric: str = "") -> Table:
    """The runs for a terminal. A user's plan is shown by its class, a setting by the last part of
    its key."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("run", overflow="fold")
    shown.add_column("plan", overflow="fold")
    for name in ("steps", "score", "best", "reward", *([metric] if metric else ()), "time"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("state", no_wrap=True)
    if any(run.differs for run in runs):
        shown.add_column("settings that differ", overflow="fold")
    for run in runs:
        if run.of_steps:
            steps = f"{run.steps}/{run.of_steps}"
        else:
            steps = str(run.steps)
        values = [run.score, run.best_score, run.reward, *([run.sorted_by] if metric else [])]
        figures = ["-" if value is None else f"{value:.3f}" for value in values]
        took = "-" if run.seconds is None else duration(run.seconds)
        colour = _COLOURS.get(run.state, "dim")
        differs = [
            f"{key.rpartition('.')[2]}={value}" for key, value in islice(run.differs.items(), MOST)
        ]
        if len(run.differs) > MOST:
            more = [f"and {len(run.differs) - MOST} more"]
        else:
            more = []
        plan = run.plan.rpartition(":")[2]
        shown.add_row(
            run.name,
            plan,
            steps,
            *figures,
            took,
            Text(run.state, colour),
            Text(" ".join(differs + more)),
        )
    return shown
