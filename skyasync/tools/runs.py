"""``skyasync runs [FOLDER]``: the runs of a folder, the newest first."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from skyasync.errors import UserError
from skyasync.observe import jsonl
from skyasync.observe.lines import duration
from skyasync.observe.status import FAILED, FINISHED, LOST, RUNNING, STOPPED, Status, read_status
from skyasync.tools.verbs import Arguments

HELP = """\
usage: skyasync runs [FOLDER] [--json]

Lists the runs of a folder (runs, if none is named), the newest first: plan, steps, held-out score (last, and best),
training reward, time, and whether they go on, or how they ended. A run is lost if its process is gone without a word.
"""
_COLOURS = {RUNNING: "cyan", FINISHED: "green", STOPPED: "yellow", FAILED: "red", LOST: "red"}


@dataclass(frozen=True)
class Listed:
    """A run in the list; None is what nobody has written down. ``seconds`` from its start to its newest step."""

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


def runs(argv: Arguments) -> None:
    """Print the table, or the list as JSON."""
    if "--help" in argv or "-h" in argv:
        print(HELP, end="")
        return
    folders = [argument for argument in argv if argument != "--json"]
    if wrong := [argument for argument in folders if argument.startswith("-")]:
        raise UserError(f"unknown option {wrong[0]}: skyasync runs takes a folder and --json")
    if len(folders) > 1:
        raise UserError(f"skyasync runs lists one folder; {len(folders)} are named")
    found = listed(Path(folders[0] if folders else "runs"))
    if "--json" in argv:
        print(json.dumps([asdict(run) for run in found], indent=1))
    else:
        Console().print(table(found))


def listed(folder: Path) -> list[Listed]:
    """The runs in a folder, the newest first.

    Raises:
        UserError: if there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: name the one that trainer.runs_dir has")
    runs = [_look_at(path) for path in folder.iterdir() if is_run(path)]
    if not runs:
        raise UserError(f"there is no run in {folder}: a run's folder has a config.yaml")
    return sorted(runs, key=lambda run: (-run.began, run.name))


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()


def _look_at(path: Path) -> Listed:
    rows, status = jsonl.read_rows(path / "metrics.jsonl"), read_status(path)
    trainer = _trainer(path / "config.yaml")
    steps = [row for row in rows if row["step"] > 0]
    scores = [row["eval/score"] for row in rows if row.get("eval/score") is not None]
    rewards = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
    began = status.began or (rows[0].get("time") if rows else None) or path.stat().st_mtime
    return Listed(
        name=path.name,
        state=status.state,
        plan=str(trainer.get("plan", "")),
        steps=steps[-1]["step"] if steps else 0,
        of_steps=trainer.get("max_training_steps") or None,  # type: ignore[arg-type]
        score=scores[-1] if scores else None,
        best_score=max(scores, default=None),
        reward=rewards[-1] if rewards else None,
        seconds=_seconds(status, rows, began),
        began=began,
    )


def _seconds(status: Status, rows: Sequence[jsonl.Row], began: float) -> float | None:
    ended = time.time() if status.state == RUNNING else status.ended or (rows[-1].get("time") if rows else None)
    return round(ended - began, 1) if ended else None


def _trainer(config: Path) -> dict[str, object]:
    """The part of a run's settings that is listed; empty where they cannot be read."""
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        values = yaml.load(config.read_text(encoding="utf-8"), Loader=loader)
        return dict(values["trainer"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return {}


def table(runs: Sequence[Listed]) -> Table:
    """For a terminal."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("run", overflow="fold")
    shown.add_column("plan", overflow="fold")
    for name in ("steps", "score", "best", "reward", "time"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("state")
    for run in runs:
        steps = f"{run.steps}/{run.of_steps}" if run.of_steps else str(run.steps)
        figures = (_figure(run.score), _figure(run.best_score), _figure(run.reward))
        took = "-" if run.seconds is None else duration(run.seconds)
        colour = _COLOURS.get(run.state, "dim")
        shown.add_row(run.name, run.plan, steps, *figures, took, f"[{colour}]{run.state}[/]")
    return shown


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
