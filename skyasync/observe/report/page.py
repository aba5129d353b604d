"""From runs' folders to one page, findings first: how the run ended, and figures that rarely are as they should be."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.config.values import written
from skyasync.observability import jsonl
from skyasync.observability.lines import duration
from skyasync.observability.plots import Row, series
from skyasync.observability.report import figures, samples, settings
from skyasync.observability.report.charts import sections
from skyasync.observability.status import FAILED, LOST, RUNNING, STOPPED, Status, read_status
from skyasync.observability.summary import Summary, summarise

if TYPE_CHECKING:
    from jinja2 import Template


RECENT = 10  # steps
_WARNINGS = {
    "warnings/stuck_ratio": "the ratio of proximal to behaviour policy was exactly 1 on stale tokens: the behaviour "
    "log-probabilities seem not to be the engine's",
    "warnings/repeated_samples": "samples repeated each other as chance would not: are their seeds the same?",
    "warnings/non_finite": "a metric was NaN or infinite",
}


@dataclass(frozen=True)
class Finding:
    """``grave`` for what ended the run, or spoils it."""

    text: str
    grave: bool = False


def findings(folder: Path, rows: Sequence[Row], status: Status) -> list[Finding]:
    """The gravest first."""
    found = [*_ending(folder, status), *_logged(rows), *_figures(rows)]
    return sorted(found, key=lambda finding: not finding.grave)


def _ending(folder: Path, status: Status) -> Iterator[Finding]:
    if status.state == FAILED:
        yield Finding(f"The run failed: {_last_line(folder / 'error.txt')}", grave=True)
    elif status.state == LOST:
        yield Finding("The run's process is gone without a word: it was killed, or its machine ended.", grave=True)
    elif status.state == STOPPED:
        yield Finding("The run was stopped before its end.")


def _last_line(path: Path) -> str:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "nothing is written down of why"
    return next((line for line in reversed(lines) if line), "error.txt is empty")


def _logged(rows: Sequence[Row]) -> Iterator[Finding]:
    names = sorted({name for row in rows for name in row if name.startswith("warnings/") and row[name]})
    for name in names:
        steps = [row["step"] for row in rows if row.get(name)]
        when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"
        yield Finding(f"{_WARNINGS.get(name, name)} ({name}: {when})")


def _figures(rows: Sequence[Row]) -> Iterator[Finding]:
    """Means over the last steps."""

    def recent(name: str) -> float | None:
        values = series(rows, name)[1][-RECENT:]
        return sum(values) / len(values) if values else None

    last = f"of the last {min(RECENT, len(rows))} steps"
    if (share := recent("response/truncated")) is not None and share > 0.3:
        yield Finding(f"{share:.0%} of the responses {last} were cut by their length: raise "
                      f"generator.sampling_params.max_generate_length, or look at the samples.")  # fmt: skip
    if (share := recent("reward/mixed_groups")) is not None and share < 0.1:
        yield Finding(f"Only {share:.0%} of the groups {last} have different rewards: the others teach a "
                      f"group-relative estimator nothing.")  # fmt: skip
    if (share := recent("off_policy/effective_sample_size")) is not None and share < 0.5:
        yield Finding(f"The effective sample size {last} is {share:.0%} of the tokens: the policy that trains is far "
                      f"from the one that samples.")  # fmt: skip
    if (norm := recent("policy/grad_norm")) is not None and norm == 0:
        yield Finding(f"The gradient {last} is 0: nothing is learnt.")
    scores = series(rows, "eval/score")[1]
    if len(scores) > 1 and max(scores) - scores[-1] > 0.1:
        yield Finding(f"The held-out score fell from its best, {max(scores):.2f}, to {scores[-1]:.2f}.")


logger = logging.getLogger(__name__)

NAME = "report.html"


@dataclass(frozen=True)
class Run:
    """What a page needs of one run."""

    folder: Path
    label: str

    @cached_property
    def rows(self) -> list[Row]:
        return list(jsonl.read_rows(self.folder / "metrics.jsonl"))

    @cached_property
    def status(self) -> Status:
        return read_status(self.folder)

    @cached_property
    def settings(self) -> settings.Values:
        return settings.read(self.folder / "config.yaml")

    @cached_property
    def summary(self) -> Summary:
        return summarise(self.rows)

    @property
    def plan(self) -> str:
        return str(self.settings.get("trainer.plan", ""))

    @property
    def model(self) -> str:
        return Path(str(self.settings.get("trainer.policy.model.path", ""))).name

    @property
    def took(self) -> str:
        return duration(self.summary.total_s)

    @property
    def last_reward(self) -> str:
        rewards = series(self.rows, "reward/mean")[1]
        return f"{rewards[-1]:.3f}" if rewards else "–"

    @property
    def running(self) -> bool:
        return self.status.state == RUNNING

    def tiles(self) -> list[tuple[str, str, str]]:
        """Name, figure, and a word about it."""
        summary, means = self.summary, self.summary.means
        rewards = series(self.rows, "reward/mean")[1]
        found: list[tuple[str, str, str]] = []
        if summary.first and summary.last and summary.best:
            word = f"from {summary.first.value:.2f}, best {summary.best.value:.2f} in step {summary.best.step}"
            found.append(("held-out score", f"{summary.last.value:.3f}", word))
        if rewards:
            found.append(("reward", f"{rewards[-1]:.3f}", f"from {rewards[0]:.2f}"))
        if summary.step_s is not None:
            found.append(("steps", f"{summary.steps:,}", f"{duration(summary.total_s)}, {summary.step_s:.2f} s each"))
        for name, label, form in (
            ("throughput/samples_per_s", "samples/s", "{:,.0f}"), ("throughput/tokens_per_s", "tokens/s", "{:,.0f}"),
            ("staleness/mean", "mean staleness", "{:.2f}"), ("idle/trainer", "trainer idle", "{:.0%}"),
            ("idle/engines", "engines idle", "{:.0%}"),
        ):  # fmt: skip
            if name in means:
                found.append((label, form.format(means[name]), ""))
        return found


def write_report(folder: Path) -> bool:
    """``report.html`` in a run's folder; False, and a warning, if it could not be made."""
    try:
        jsonl.replace_text(folder / NAME, page([folder]))
    except Exception as error:  # a page is never worth a run
        logger.warning("%s was not made: %s: %s", folder / NAME, type(error).__name__, error)
        return False
    return True


def page(folders: Sequence[Path], refresh_s: float = 0.0) -> str:
    """The page about one run, or the one that compares several.

    Args:
        refresh_s: seconds after which the browser reloads the page of a run that goes on; 0: never.
    """
    runs = [Run(folder, label) for folder, label in zip(folders, labels(folders), strict=True)]
    drawn = {run.label: run.rows for run in runs}
    every = [row for run in runs for row in run.rows]
    context: dict[str, Any] = {
        "runs": runs,
        "title": runs[0].label if len(runs) == 1 else f"{len(runs)} runs",
        "sections": [
            (part, [(chart, figures.draw(chart, drawn)) for chart in part.charts])
            for part in sections(every, several=len(runs) > 1)
        ],
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "refresh_s": refresh_s if any(run.running for run in runs) else 0,
        "colours": [f"var(--c{n % figures.COLOURS})" for n in range(len(runs))],
        "findings": {run.label: findings(run.folder, run.rows, run.status) for run in runs},
        "full_gap": samples.FULL_GAP,
        **(_of_one(runs[0]) if len(runs) == 1 else {"differing": settings.differing([run.settings for run in runs])}),
    }
    return _template().render(context)


def _of_one(run: Run) -> Mapping[str, Any]:
    """What only a page about one run has room for."""
    spans = figures.last_steps(figures.read_spans(run.folder / "timeline.json"))
    return {
        "timeline": figures.draw_timeline(spans),
        "samples": samples.chosen(jsonl.read_rows(run.folder / "samples.jsonl")),
        "changed": settings.changed(run.settings, settings.read_origins(run.folder / "origins.json")),
        "all_settings": run.settings,
    }


def labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names; their paths where two have the same."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    here = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=here, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["written"] = written
    return made.get_template("page.html.j2")
