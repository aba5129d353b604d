"""The summary of a run with fault injection: every event with its cost, and the audit of the run's files.

Invariant: the summary contains every complaint, and any complaint makes the tool fail.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from skyasync.observability.jsonl import read_rows
from tests.chaos.audit import (
    Seen,
    costs,
    table,
    unexplained,
    unlike,
    unnoticed,
    usual_s,
    wrong_prompts,
    wrong_steps,
)

SUMMARY, RECORD = "chaos.md", "chaos.json"
SCORE = "eval/score"


def complaints(seen: Seen, folder: Path) -> list[str]:
    """What is wrong, in words; empty if the run passed."""
    steps = [int(row["step"]) for row in read_rows(folder / "metrics.jsonl")]
    ledger = read_rows(folder / "ledger.jsonl")
    found = (
        unexplained(seen)
        + unnoticed(seen)
        + wrong_steps(steps)
        + wrong_prompts(ledger)
        + unlike(ledger, steps)
    )
    if not seen.steps:
        found.append("no step was finished")
    if seen.ended.startswith("given up"):
        found.append(seen.ended)
    return found + [f"left behind: {what}" for what in seen.left]


def summary(seen: Seen, folder: Path, wrong: Sequence[str]) -> list[str]:
    """The summary in Markdown."""
    usual, hit = usual_s(seen.steps), [outcome for outcome in seen.outcomes if outcome.hit]
    lines = [
        f"{len(seen.outcomes)} events in {seen.seconds / 60:.1f} minutes, {len(hit)} of which had a target; "
        f"{seen.steps[-1][1] if seen.steps else 0} steps of usually {usual:.2f} s; the command was started "
        f"{len(seen.starts)} times; at the end {seen.ended}.",
        "",
        *_by_kind(seen),
        "",
        *_score(read_rows(folder / "metrics.jsonl")),
        *(f"Started after {at:.0f} s: {why}." for at, why in seen.starts[1:]),
        "",
        *table(seen),
        "",
        *(["**Wrong:**", *(f"- {line}" for line in wrong)] if wrong else [_fine(folder)]),
    ]
    return lines


def write(seen: Seen, folder: Path, lines: Sequence[str], wrong: Sequence[str]) -> None:
    """Write the summary and all observations into the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).write_text("\n".join(["# Chaos", "", *lines, ""]), encoding="utf-8")
    record = json.dumps(asdict(seen) | {"wrong": list(wrong)}, default=str)
    (folder / RECORD).write_text(record + "\n", encoding="utf-8")


def _by_kind(seen: Seen) -> list[str]:
    lines = ["| kind | events | cost, median | largest |", "|---|---|---|---|"]
    for kind, found in sorted(costs(seen).items()):
        lines.append(f"| {kind} | {len(found)} | {median(found):.1f} s | {max(found):.1f} s |")
    return lines


def _score(rows: Sequence[dict[str, Any]]) -> list[str]:
    scores = [(row["step"], row[SCORE]) for row in rows if SCORE in row]
    if not scores:
        return []
    (_, first), (step, last) = scores[0], scores[-1]
    return [f"Held-out score: {first:.2f} first, {last:.2f} at step {step}.", ""]


def _fine(folder: Path) -> str:
    lines = read_rows(folder / "ledger.jsonl")
    prompts = sum(
        len(line[end])
        for line in lines
        for end in ("trained", "rejected", "given_up")
        if end in line
    )
    return (
        f"Nothing is wrong: {prompts} prompts ended once each, no step number is missing or there twice, the run did "
        f"not end by itself but by an event, and nothing was left of processes, shared memory or temporary files."
    )
