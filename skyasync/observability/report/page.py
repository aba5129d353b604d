"""One page about the folders of runs, findings first: how a run ended, and its alarms.

Then the samples that the run wrote: of its first, a middle and its last step, token by token if
tokens are recorded.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from skyasync.config.values import written
from skyasync.observability import jsonl
from skyasync.observability.alarms import RESTARTS, alarms
from skyasync.observability.lines import duration
from skyasync.observability.plots import Row, labels
from skyasync.observability.report import figures, settings
from skyasync.observability.report.charts import Chart, Section, sections
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
    """A problem of a run, in words."""

    text: str
    grave: bool = False  # it ended the run, or spoils it
    nothing_learned: bool = False  # an alarm after which the speed does not matter


def findings(folder: Path, rows: Sequence[Row], status: Status) -> list[Finding]:
    """The gravest first: how the run ended, its warnings, and the alarms of its last steps."""
    result: list[Finding] = []
    if status.state == FAILED:
        result.append(Finding(f"The run failed: {_error(folder)}", grave=True))
    elif status.state == LOST:
        message = "The run's process ended without a reason: it was killed, or its machine stopped."
        result.append(Finding(message, grave=True))
    elif status.state == STOPPED:
        result.append(Finding("The run was stopped before its end."))
    for name, steps in sorted(_warning_steps(rows).items()):
        if len(steps) == 1:
            when = f"step {steps[0]}"
        else:
            when = f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"
        result.append(Finding(f"{_WARNINGS.get(name, name)} ({name}: {when})"))
    for alarm in alarms(rows, jsonl.read_rows(folder / RESTARTS)):
        result.append(Finding(alarm.text, nothing_learned=alarm.nothing_learned))
    # The sort is stable: alarms stay in the order of causes.
    return sorted(result, key=lambda finding: not finding.grave)


def _error(folder: Path) -> str:
    """The last line of the traceback, which is the error itself."""
    try:
        text = (folder / "error.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "error.txt is missing"
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "error.txt is empty"


def _warning_steps(rows: Sequence[Row]) -> dict[str, list[int]]:
    """The steps with each warning, by the name of its metric."""
    steps: dict[str, list[int]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("warnings/") and value:
                steps.setdefault(name, []).append(row["step"])
    return steps


class Tile(NamedTuple):
    """A figure at the top of the page, and a word about it."""

    name: str
    figure: str
    word: str = ""


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
        self.rewards = jsonl.values_of(self.rows, "reward/mean")
        self.last_reward = f"{self.rewards[-1]:.3f}" if self.rewards else "–"

    def chart_rows(self) -> list[Row]:
        """The rows, without the idle engines of a last step that had nothing left to generate."""
        rows = list(self.rows)
        if rows and rows[-1].get("throughput/tokens_per_s") == 0:
            idle = ("throughput/", "idle/")
            row = rows.pop().items()
            rows.append({name: value for name, value in row if not name.startswith(idle)})
        return rows

    def tiles(self) -> list[Tile]:
        """The tiles of the page; figures that were not logged have none."""
        summary = self.summary
        means = summary.means
        tiles = []
        if summary.first and summary.last and summary.best:
            best = summary.best
            word = f"from {summary.first.value:.2f}, best {best.value:.2f} in step {best.step}"
            tiles.append(Tile("held-out score", f"{summary.last.value:.3f}", word))
        if self.rewards:
            word = f"from {self.rewards[0]:.2f}"
            tiles.append(Tile("reward", self.last_reward, word))
        if summary.step_s is not None:
            tiles.append(Tile("steps", f"{summary.steps:,}", course(summary)))
        for name, label, form in FIGURES:
            if name not in means or name == "sync/logprob_gap":  # a chart shows it
                continue
            word = ""
            if name == "throughput/samples_per_s" and summary.samples_per_s is not None:
                word = f"{form.format(summary.samples_per_s)} without evaluations"
            tiles.append(Tile(label, form.format(means[name]), word))
        return tiles


@dataclass(frozen=True)
class Token:
    """A token of a response, with its log-probabilities in nats."""

    text: str
    version: int  # of the policy, which is the number of a colour; -1: text of the environment
    gap: float | None  # trainer minus engine
    says: str
    engine: float | None = None
    trainer: float | None = None

    @property
    def strength(self) -> float:
        """Strength of the gap's colour, from 0 to 1."""
        if self.gap is None or abs(self.gap) < NEGLIGIBLE:
            return 0.0
        root = math.sqrt(abs(self.gap) / FULL_GAP)  # a root makes small gaps visible
        return round(min(1.0, root), 2)


@dataclass(frozen=True)
class PageSample:
    """A sample as the page shows it."""

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
    """A column of the page: the samples of one step."""

    number: int
    samples: list[PageSample]


def sample_steps(rows: Sequence[Row], *, newest: bool = False) -> list[Step]:
    """The samples of the first, the last, and steps evenly between: ``COLUMNS`` steps.

    Args:
        newest: the newest steps instead, the last one first.
    """
    step_rows: dict[int, list[Row]] = {}
    for row in rows:
        step_rows.setdefault(row["step"], []).append(row)
    steps = sorted(step_rows)
    if newest:
        steps = steps[: -COLUMNS - 1 : -1]
    elif len(steps) > COLUMNS:
        gap = (len(steps) - 1) / (COLUMNS - 1)
        steps = [steps[round(column * gap)] for column in range(COLUMNS)]
    return [Step(step, list(map(sample_of, step_rows[step]))) for step in steps]


def sample_of(row: Row) -> PageSample:
    """The sample of a row of ``samples.jsonl`` or ``eval_samples.jsonl``."""
    label = row.get("label")
    reward = row.get("reward")
    tokens = _tokens(row)
    gaps = [abs(token.gap) for token in tokens if token.gap is not None]
    return PageSample(
        name=" ".join(str(row[key]) for key in ("eval_set", "prompt_id") if key in row),
        prompt=str(row.get("prompt", "")),
        response=str(row.get("response", "")),
        label="" if label is None else str(label),
        reward=math.nan if reward is None else float(reward),
        stop_reason=str(row.get("stop_reason", "")),
        versions=list(row.get("versions") or []),
        tokens=tokens,
        gap=max(gaps, default=None),
        # A browser would fetch other URLs: the page needs no network.
        images=[url for url in row.get("images") or [] if str(url).startswith("data:image/")],
    )


def _tokens(row: Row) -> list[Token]:
    """The tokens of a row's sample; none if they were not recorded."""
    columns = row.get("tokens") or {}
    texts = columns.get("text") or []
    versions = columns.get("versions") or []
    engine_logprobs = columns.get("logprobs") or [None] * len(texts)
    trainer_logprobs = columns.get("trainer_logprobs") or [None] * len(texts)
    tokens = []
    for text, version, engine, trainer in zip(
        texts, versions, engine_logprobs, trainer_logprobs, strict=False
    ):
        gap = None
        if engine is not None and trainer is not None:
            gap = trainer - engine
        title = "from the environment"
        if version >= 0:
            title = f"version {version}"
            staleness = row["step"] - 1 - version  # step n trains the policy of version n - 1
            if staleness > 0:
                title += f", {staleness} old"
            if engine is not None:
                title += f" · engine {engine:.3f}"
            if trainer is not None:
                title += f" · trainer {trainer:.3f}"
        tokens.append(
            Token(
                text,
                version,
                gap=gap,
                says=title,
                engine=engine,
                trainer=trainer,
            )
        )
    return tokens


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
    running = any(run.status.state == RUNNING for run in runs)
    context: dict[str, Any] = {
        "runs": runs,
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "sections": list(_drawn_sections(runs)),  # the template reads them twice
        "live_script": LIVE_SCRIPT if live else "",
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "refresh_s": refresh_s if running else 0,
        "colours": [f"var(--c{number % figures.COLOURS})" for number in range(len(runs))],
        "findings": {run.label: findings(run.folder, run.rows, run.status) for run in runs},
        "full_gap": FULL_GAP,
    }
    if len(runs) == 1:
        folder = runs[0].folder
        spans = figures.last_steps(figures.read_spans(folder / "timeline.json"))
        samples = jsonl.read_rows(folder / "samples.jsonl")
        eval_samples = jsonl.read_rows(folder / "eval_samples.jsonl")
        origins = settings.read_origins(folder / "origins.json")
        context["timeline"] = figures.draw_timeline(spans)
        context["samples"] = {
            "training": sample_steps(samples, newest=live),
            "evaluation": sample_steps(eval_samples, newest=live),
        }
        context["changed"] = settings.changed(runs[0].settings, origins)
        context["all_settings"] = runs[0].settings
    else:
        context["differing"] = settings.differing([run.settings for run in runs])
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # the page shows what a model has generated
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["written"] = written
    return templates.get_template("page.html.j2").render(context)


def _drawn_sections(runs: Sequence[Run]) -> Iterator[tuple[Section, list[tuple[Chart, str]]]]:
    """The sections about these runs, each chart with its SVG ("" if it has no data)."""
    rows = [row for run in runs for row in run.rows]
    chart_rows = {run.label: run.chart_rows() for run in runs}
    for section in sections(rows, several=len(runs) > 1):
        yield section, [(chart, figures.draw(chart, chart_rows)) for chart in section.charts]
