"""From runs' folders to one page, findings first: how the run ended, and figures that rarely are as
they should be.

Then what the run wrote: its first, a middle and its last samples, token by token where they are
recorded.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyasync.config.values import written
from skyasync.observability import jsonl
from skyasync.observability.alarms import RESTARTS, alarms
from skyasync.observability.lines import duration
from skyasync.observability.plots import Row, labels, series
from skyasync.observability.report import figures, settings
from skyasync.observability.report.charts import sections
from skyasync.observability.run_dir import FAILED, LOST, RUNNING, STOPPED, Status, read_status
from skyasync.observability.summary import FIGURES, course, summarise

logger = logging.getLogger(__name__)

NAME = "report.html"
LIVE_SCRIPT = (Path(__file__).parent / "live.js").read_text(encoding="utf-8").rstrip("\n")
COLUMNS = 3  # steps side by side
FULL_GAP = 1.0  # nats at which the colour is full
NEGLIGIBLE = 1e-3  # nats: rounding
_WARNINGS = {
    "warnings/stuck_ratio": "the ratio of proximal to behaviour policy was exactly 1 on stale tokens: the behaviour "
    "log-probabilities are probably not the engine's",
    "warnings/non_finite": "a metric was NaN or infinite",
}


@dataclass(frozen=True)
class Finding:
    """``grave`` for what ended the run, or spoils it; ``nothing_learned`` for an alarm after which
    speed is nothing."""

    text: str
    grave: bool = False
    nothing_learned: bool = False


def findings(folder: Path, rows: Sequence[Row], status: Status) -> list[Finding]:
    """The gravest first: how the run ended, its warnings, and the alarms of its last steps."""
    result: list[Finding] = []
    if status.state == FAILED:
        try:
            text = (folder / "error.txt").read_text(encoding="utf-8", errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            last_line = lines[-1] if lines else "error.txt is empty"
        except OSError:
            last_line = "error.txt is missing"
        result.append(Finding(f"The run failed: {last_line}", grave=True))
    elif status.state == LOST:
        message = "The run's process ended without a reason: it was killed, or its machine stopped."
        result.append(Finding(message, grave=True))
    elif status.state == STOPPED:
        result.append(Finding("The run was stopped before its end."))
    for name in sorted(
        {name for row in rows for name in row if name.startswith("warnings/") and row[name]}
    ):
        steps = [row["step"] for row in rows if row.get(name)]
        if len(steps) == 1:
            when = f"step {steps[0]}"
        else:
            when = f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"
        result.append(Finding(f"{_WARNINGS.get(name, name)} ({name}: {when})"))

    restarts = jsonl.read_rows(folder / RESTARTS)
    result += [
        Finding(alarm.text, nothing_learned=alarm.nothing_learned)
        for alarm in alarms(rows, restarts)
    ]
    return sorted(result, key=lambda finding: not finding.grave)


class Run:
    """The data of one run that a page shows."""

    def __init__(self, folder: Path, label: str) -> None:
        self.folder = folder
        self.label = label
        self.rows: list[Row] = list(jsonl.read_rows(folder / "metrics.jsonl"))
        self.status = read_status(folder)
        self.settings = settings.read(folder / "config.yaml")
        self.plan = str(self.settings.get("trainer.plan", ""))
        self.model = Path(str(self.settings.get("trainer.policy.model.path", ""))).name
        self.summary = summarise(self.rows)
        self.took = duration(self.summary.total_s)
        rewards = series(self.rows, "reward/mean")[1]
        self.last_reward = f"{rewards[-1]:.3f}" if rewards else "–"

    @property
    def drawn(self) -> list[Row]:
        """The rows, without the idle engines of a last step that had nothing left to generate."""
        *before, last = self.rows or [{}]
        if last.get("throughput/tokens_per_s") == 0:
            last = {k: v for k, v in last.items() if not k.startswith(("throughput/", "idle/"))}
        if self.rows:
            return [*before, last]
        return []

    def tiles(self) -> list[tuple[str, str, str]]:
        """Name, figure, and a word about it."""
        summary = self.summary
        means = self.summary.means
        rewards = series(self.rows, "reward/mean")[1]
        tiles: list[tuple[str, str, str]] = []
        if summary.first and summary.last and summary.best:
            word = f"from {summary.first.value:.2f}, best {summary.best.value:.2f} in step {summary.best.step}"
            tiles.append(("held-out score", f"{summary.last.value:.3f}", word))
        if rewards:
            tiles.append(("reward", f"{rewards[-1]:.3f}", f"from {rewards[0]:.2f}"))
        if summary.step_s is not None:
            tiles.append(("steps", f"{summary.steps:,}", course(summary)))
        for name, label, form in FIGURES:
            if name not in means or name == "sync/logprob_gap":
                continue
            word = ""
            if name == "throughput/samples_per_s" and summary.samples_per_s is not None:
                word = f"{form.format(summary.samples_per_s)} without evaluations"
            tiles.append((label, form.format(means[name]), word))
        return tiles


@dataclass(frozen=True)
class Token:
    """``version`` is the number of a colour, -1 for text of the environment; ``gap`` is trainer
    minus engine."""

    text: str
    version: int
    gap: float | None
    says: str
    engine: float | None = None
    trainer: float | None = None

    @property
    def strength(self) -> float:
        """Strength of the gap's colour, from 0 to 1: a square root, so that small gaps are
        visible."""
        if self.gap is None or abs(self.gap) < NEGLIGIBLE:
            return 0.0
        return round(min(1.0, math.sqrt(abs(self.gap) / FULL_GAP)), 2)


@dataclass(frozen=True)
class PageSample:
    name: str
    prompt: str
    response: str
    label: str  # the right answer; "" if the row has none
    reward: float
    stop_reason: str
    versions: list[int]
    tokens: list[Token]
    gap: float | None  # the largest
    images: list[str]  # data: URLs

    @property
    def ended(self) -> str:
        return {"stop": "ended", "length": "cut by length"}.get(self.stop_reason, self.stop_reason)


@dataclass(frozen=True)
class Step:
    number: int
    samples: list[PageSample]


def chosen(rows: Sequence[Row], columns: int = COLUMNS, *, newest: bool = False) -> list[Step]:
    """The samples of the first, the last, and steps evenly between; or of the newest steps, the
    last one first."""
    steps = sorted({row["step"] for row in rows})
    if not steps:
        return []
    if newest:
        shown = steps[: -columns - 1 : -1]
    else:
        shown = sorted(
            {steps[round(n * (len(steps) - 1) / max(columns - 1, 1))] for n in range(columns)}
        )
    return [Step(step, [sample_of(row) for row in rows if row["step"] == step]) for step in shown]


def sample_of(row: Row) -> PageSample:
    """The sample of a row of ``samples.jsonl`` or ``eval_samples.jsonl``."""
    columns = row.get("tokens") or {}
    texts = columns.get("text") or []
    versions = columns.get("versions") or []
    engine = columns.get("logprobs") or [None] * len(texts)
    trainer = columns.get("trainer_logprobs") or [None] * len(texts)
    tokens = []
    for text, version, theirs, ours in zip(texts, versions, engine, trainer, strict=False):
        staleness = row["step"] - 1 - version
        words = [f"version {version}" + (f", {staleness} old" if staleness > 0 else "")]
        words += [f"engine {theirs:.3f}"] if theirs is not None else []
        words += [f"trainer {ours:.3f}"] if ours is not None else []
        if ours is not None and theirs is not None:
            gap = ours - theirs
        else:
            gap = None
        if version < 0:
            title = "from the environment"
        else:
            title = " · ".join(words)
        tokens.append(Token(text, version, gap, title, theirs, ours))
    return PageSample(
        name=" ".join(str(row[key]) for key in ("eval_set", "prompt_id") if key in row),
        prompt=str(row.get("prompt", "")),
        response=str(row.get("response", "")),
        label="" if row.get("label") is None else str(row["label"]),
        reward=math.nan if row.get("reward") is None else float(row["reward"]),
        stop_reason=str(row.get("stop_reason", "")),
        versions=list(row.get("versions") or []),
        tokens=tokens,
        gap=max((abs(token.gap) for token in tokens if token.gap is not None), default=None),
        images=[url for url in row.get("images") or [] if str(url).startswith("data:image/")],
    )


def write_report(folder: Path) -> bool:
    """``report.html`` in a run's folder; False, and a warning, if it could not be made."""
    try:
        jsonl.replace_text(folder / NAME, page([folder]))
    except Exception as error:  # a page is never worth a run
        logger.warning("%s was not made: %s: %s", folder / NAME, type(error).__name__, error)
        return False
    return True


def page(folders: Sequence[Path], refresh_s: float = 0.0, *, live: bool = False) -> str:
    """The page about one run, or the one that compares several.

    Args:
        refresh_s: seconds after which the browser reloads the page of a run that goes on; 0: never.
        live: a server sends the page; its script fetches the next one, and the newest samples are
            shown.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    runs = [Run(folder, label) for folder, label in zip(folders, labels(folders), strict=True)]
    drawn = {run.label: run.drawn for run in runs}
    every = [row for run in runs for row in run.rows]
    context: dict[str, Any] = {
        "runs": runs,
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "sections": [
            (part, [(chart, figures.draw(chart, drawn)) for chart in part.charts])
            for part in sections(every, several=len(runs) > 1)
        ],
        "live_script": LIVE_SCRIPT if live else "",
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "refresh_s": refresh_s if any(run.status.state == RUNNING for run in runs) else 0,
        "colours": [f"var(--c{n % figures.COLOURS})" for n in range(len(runs))],
        "findings": {run.label: findings(run.folder, run.rows, run.status) for run in runs},
        "full_gap": FULL_GAP,
    }
    if len(runs) == 1:
        folder = runs[0].folder
        spans = figures.last_steps(figures.read_spans(folder / "timeline.json"))
        context |= {
            "timeline": figures.draw_timeline(spans),
            "samples": {
                kind: chosen(jsonl.read_rows(folder / name), newest=live)
                for kind, name in (
                    ("training", "samples.jsonl"),
                    ("evaluation", "eval_samples.jsonl"),
                )
            },
            "changed": settings.changed(
                runs[0].settings, settings.read_origins(folder / "origins.json")
            ),
            "all_settings": runs[0].settings,
        }
    else:
        context["differing"] = settings.differing([run.settings for run in runs])
    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["written"] = written
    return templates.get_template("page.html.j2").render(context)
