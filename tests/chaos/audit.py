"""The result of a run with injected faults: the time that each fault cost, and what was lost, doubled or left over.

Pure functions. Invariant: an audit without complaints means that every prompt in the ledger ended once; that steps are
numbered from 1 without a gap; that no process of the run is left; that a fault (``Kind.ends``) explains each error that
ended the run; and that no engine computed with damaged weights.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from skyasync.trainer.extensions.prompt_ledger import audit
from tests.chaos.channel import MISSED_S, USED
from tests.chaos.events import Event

NAMED = 5  # complaints by name
STEPS_SEEN = 3  # steps after an event that are compared with the usual step time


@dataclass(frozen=True)
class Outcome:
    """The outcome of an event.

    Args:
        at: seconds from the beginning, when the fault was injected.
        hit: the part that the fault hit; "" if there was none.
    """

    event: Event
    at: float
    hit: str


@dataclass(frozen=True)
class Ending:
    """The command ended without being killed.

    Args:
        began: seconds from the beginning, when the command was started.
        at: when it ended.
        how: its exit status, in words.
        error: the last line of its traceback; "" if there is none.
    """

    began: float
    at: float
    how: str
    error: str

    def __str__(self) -> str:
        return f"{self.how}, {self.error or 'without a traceback in error.txt'}"


@dataclass
class Seen:
    """What an observer outside of the run saw.

    Attributes:
        steps: seconds from the beginning at which a step finished that no earlier start had reached, and its number.
        starts: seconds from the beginning at which the command was started, and why.
        endings: each time that the command ended without being killed, before it was done.
        left: processes and files that were left after the end.
        began: unix time of the beginning.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    starts: list[tuple[float, str]] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ended: str = ""
    began: float = 0.0
    seconds: float = 0.0

    def step(self, at: float, number: int) -> None:
        """A step was added to the metrics. A step that is repeated after a restore does not count."""
        if number > (self.steps[-1][1] if self.steps else 0):
            self.steps.append((at, number))


def usual_s(steps: Sequence[tuple[float, int]]) -> float:
    """Median seconds of a step, which a few faults hardly change. 0 if there are too few steps."""
    gaps = [(second - first) / (b - a) for (first, a), (second, b) in itertools.pairwise(steps)]
    return median(gaps) if gaps else 0.0


def cost_s(at: float, steps: Sequence[tuple[float, int]], usual: float) -> float | None:
    """Seconds by which the next steps finished later than usual; None if they did not.

    The first of these steps may no longer need the failed part (an engine, while the policy trains), so the largest
    delay of ``STEPS_SEEN`` steps counts. Events at the same time are each assigned the whole delay.
    """
    later = [when for when, _ in steps if when > at][:STEPS_SEEN]
    late = [when - at - number * usual for number, when in enumerate(later, start=1)]
    return max(0.0, *late) if late else None


def wrong_prompts(lines: Sequence[Mapping[str, object]]) -> list[str]:
    """Complaints on prompts of a ``ledger.jsonl`` that did not end exactly once."""
    twice = {name: ends for name, ends in audit(lines).items() if len(ends) != 1}
    return _few(
        [
            f"prompt {name} ended {len(ends)} times: {', '.join(ends)}"
            for name, ends in twice.items()
        ]
    )


def wrong_steps(steps: Sequence[int]) -> list[str]:
    """Complaints on the step numbers of a ``metrics.jsonl`` (0 is the evaluation before the first step)."""
    there = Counter(step for step in steps if step > 0)
    twice = [
        f"step {step} is in the metrics {times} times"
        for step, times in sorted(there.items())
        if times > 1
    ]
    gone = [
        f"step {step} is missing in the metrics"
        for step in range(1, max(there, default=0))
        if step not in there
    ]
    return _few(twice) + _few(gone)


def unlike(ledger: Sequence[Mapping[str, object]], steps: Sequence[int]) -> list[str]:
    """Complaints on steps in the metrics without prompts in the ledger."""
    told = {line["step"] for line in ledger}
    return _few(
        [
            f"step {step} is not in the ledger"
            for step in sorted(set(steps))
            if step > 0 and step not in told
        ]
    )


def explained(seen: Seen) -> dict[Ending, Outcome]:
    """The endings that an event explains, at most one per event: it hit the command, and its kind may end it so."""
    found = dict[Ending, Outcome]()
    for ending in seen.endings:
        for outcome in seen.outcomes:
            met, ends = bool(outcome.hit), outcome.event.about.ends
            then = ending.began - MISSED_S <= outcome.at <= ending.at
            if met and then and ends and ends in ending.error and outcome not in found.values():
                found[ending] = outcome
                break
    return found


def unexplained(seen: Seen) -> list[str]:
    """Complaints on endings that no event explains."""
    why = explained(seen)
    return [
        f"the run ended by itself after {e.at:.0f} s: {e}" for e in seen.endings if e not in why
    ]


def unnoticed(seen: Seen) -> list[str]:
    """Complaints on damage that engines computed with although the run did not end."""
    why, used = (
        explained(seen).values(),
        [outcome for outcome in seen.outcomes if outcome.hit.endswith(USED)],
    )
    return [
        f"event {s.event.number} was not noticed: {s.event.kind}, {s.hit}"
        for s in used
        if s not in why
    ]


def table(seen: Seen) -> list[str]:
    """A Markdown table of all events, and of each time that the command ended without being killed."""
    usual, why = usual_s(seen.steps), explained(seen)
    lines = list[tuple[float, str]]()
    for outcome in seen.outcomes:
        cost = cost_s(outcome.at, seen.steps, usual) if outcome.hit else None
        told = (
            "nothing was there"
            if not outcome.hit
            else "no step since"
            if cost is None
            else f"{cost:.1f} s"
        )
        what = f"{in_words(outcome.event)} | {outcome.hit or '-'} | {told}"
        lines.append((outcome.at, f"| {outcome.event.number} | {outcome.at:.0f} s | {what} |"))
    for ending in seen.endings:
        because = f"by event {why[ending].event.number}" if ending in why else "by no event: wrong"
        lines.append(
            (
                ending.at,
                f"| - | {ending.at:.0f} s | the run ended by itself | {ending} | {because} |",
            )
        )
    return [
        "| # | at | event | hit | cost |",
        "|---|---|---|---|---|",
        *(line for _, line in sorted(lines)),
    ]


def costs(seen: Seen) -> dict[str, list[float]]:
    """The costs of all events by kind."""
    usual, found = usual_s(seen.steps), dict[str, list[float]]()
    for outcome in seen.outcomes:
        cost = cost_s(outcome.at, seen.steps, usual) if outcome.hit else None
        if cost is not None:
            found.setdefault(outcome.event.kind, []).append(cost)
    return found


def in_words(event: Event) -> str:
    """The kind of an event, and its duration if it has one."""
    return event.kind + (
        " for good" if event.hangs else f" for {event.lasts:.1f} s" if event.lasts else ""
    )


def _few(lines: list[str]) -> list[str]:
    more = len(lines) - NAMED
    return lines[:NAMED] + ([f"... and {more} more like it"] if more > 0 else [])
