"""What on a page deserves a look first: how the run ended, and figures that rarely are as they should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyasync.observe.plots import Row, series
from skyasync.observe.status import FAILED, LOST, STOPPED, Status

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
    """Of the last steps, in the mean."""

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
