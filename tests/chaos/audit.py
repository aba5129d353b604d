"""What a run under chaos came to: what each event cost, and whether anything was lost, doubled or left behind.

Pure: it is given what was seen. Invariant: a verdict without complaints means that every prompt in the ledger ended
once, that steps are numbered from 1 without a gap, that nothing of the run lives on, and that the run did not end by
itself but by an error that an event explains (``Kind.ends``), and computed with nothing that was damaged.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from skyasync.trainer.checkpoint.ledger import audit
from tests.chaos.channel import MISSED_S, USED
from tests.chaos.events import Event

NAMED = 5  # of what is wrong, by name
STEPS_SEEN = 3  # behind an event, for what it cost


@dataclass(frozen=True)
class Strike:
    """An event as it came out.

    Args:
        at: seconds from the beginning, when it was done.
        hit: what it met; "" if there was nothing to be met.
    """

    event: Event
    at: float
    hit: str


@dataclass(frozen=True)
class Ending:
    """The command has ended by itself.

    Args:
        began: seconds from the beginning, when it was started.
        at: when it ended.
        how: its exit status, in words.
        error: the last line of its traceback; "" if it has written none.
    """

    began: float
    at: float
    how: str
    error: str

    def __str__(self) -> str:
        return f"{self.how}, {self.error or 'without a traceback in error.txt'}"


@dataclass
class Seen:
    """What was seen from outside.

    Attributes:
        steps: seconds from the beginning at which a step was finished that no earlier one had reached, and its number.
        starts: seconds from the beginning at which the command was started, and why.
        endings: of the command by itself, before it was done.
        left: what was there after the end.
        began: unix time of the beginning.
    """

    strikes: list[Strike] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    starts: list[tuple[float, str]] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ended: str = ""
    began: float = 0.0
    seconds: float = 0.0

    def step(self, at: float, number: int) -> None:
        """A step is in the metrics; one that is made again behind a checkpoint is none."""
        if number > (self.steps[-1][1] if self.steps else 0):
            self.steps.append((at, number))


def usual_s(steps: Sequence[tuple[float, int]]) -> float:
    """Seconds of a step: the median, which those that were struck hardly move. 0 if there are too few."""
    gaps = [(second - first) / (b - a) for (first, a), (second, b) in itertools.pairwise(steps)]
    return median(gaps) if gaps else 0.0


def cost_s(at: float, steps: Sequence[tuple[float, int]], usual: float) -> float | None:
    """By how many seconds the next steps were finished later than usual; None if none was.

    The first of them may have been through with what was struck (an engine, while the policy trains), so the latest of
    ``STEPS_SEEN`` counts. Events that fall together are each told the whole of it.
    """
    later = [when for when, _ in steps if when > at][:STEPS_SEEN]
    late = [when - at - number * usual for number, when in enumerate(later, start=1)]
    return max(0.0, *late) if late else None


def wrong_prompts(lines: Sequence[Mapping[str, object]]) -> list[str]:
    """Prompts of a ``ledger.jsonl`` that did not end once, in words."""
    twice = {name: ends for name, ends in audit(lines).items() if len(ends) != 1}
    return _few([f"prompt {name} ended {len(ends)} times: {', '.join(ends)}" for name, ends in twice.items()])


def wrong_steps(steps: Sequence[int]) -> list[str]:
    """What is wrong with the step numbers of a ``metrics.jsonl`` (0 is the evaluation before the first), in words."""
    there = Counter(step for step in steps if step > 0)
    twice = [f"step {step} is in the metrics {times} times" for step, times in sorted(there.items()) if times > 1]
    gone = [f"step {step} is missing in the metrics" for step in range(1, max(there, default=0)) if step not in there]
    return _few(twice) + _few(gone)


def unlike(ledger: Sequence[Mapping[str, object]], steps: Sequence[int]) -> list[str]:
    """Steps of the metrics of whose prompts the ledger says nothing, in words."""
    told = {line["step"] for line in ledger}
    return _few([f"step {step} is not in the ledger" for step in sorted(set(steps)) if step > 0 and step not in told])


def explained(seen: Seen) -> dict[Ending, Strike]:
    """The endings that an event explains: one that the command met, and that may end it so. An event explains one."""
    found = dict[Ending, Strike]()
    for ending in seen.endings:
        for strike in seen.strikes:
            met, ends = bool(strike.hit), strike.event.about.ends
            then = ending.began - MISSED_S <= strike.at <= ending.at
            if met and then and ends and ends in ending.error and strike not in found.values():
                found[ending] = strike
                break
    return found


def unexplained(seen: Seen) -> list[str]:
    """Endings that no event explains, in words."""
    why = explained(seen)
    return [f"the run ended by itself after {e.at:.0f} s: {e}" for e in seen.endings if e not in why]


def unnoticed(seen: Seen) -> list[str]:
    """Damage that engines computed with, and that did not end the run, in words."""
    why, used = explained(seen).values(), [strike for strike in seen.strikes if strike.hit.endswith(USED)]
    return [f"event {s.event.number} was not noticed: {s.event.kind}, {s.hit}" for s in used if s not in why]


def table(seen: Seen) -> list[str]:
    """A line for each event, and for each time that the command ended by itself, in Markdown."""
    usual, why = usual_s(seen.steps), explained(seen)
    lines = list[tuple[float, str]]()
    for strike in seen.strikes:
        cost = cost_s(strike.at, seen.steps, usual) if strike.hit else None
        told = "nothing was there" if not strike.hit else "no step since" if cost is None else f"{cost:.1f} s"
        what = f"{in_words(strike.event)} | {strike.hit or '-'} | {told}"
        lines.append((strike.at, f"| {strike.event.number} | {strike.at:.0f} s | {what} |"))
    for ending in seen.endings:
        because = f"by event {why[ending].event.number}" if ending in why else "by no event: wrong"
        lines.append((ending.at, f"| - | {ending.at:.0f} s | the run ended by itself | {ending} | {because} |"))
    return ["| # | at | event | hit | cost |", "|---|---|---|---|---|", *(line for _, line in sorted(lines))]


def costs(seen: Seen) -> dict[str, list[float]]:
    """By kind of event."""
    usual, found = usual_s(seen.steps), dict[str, list[float]]()
    for strike in seen.strikes:
        cost = cost_s(strike.at, seen.steps, usual) if strike.hit else None
        if cost is not None:
            found.setdefault(strike.event.kind, []).append(cost)
    return found


def in_words(event: Event) -> str:
    """Its kind, and how long it lasts if it does."""
    return event.kind + (" for good" if event.hangs else f" for {event.lasts:.1f} s" if event.lasts else "")


def _few(lines: list[str]) -> list[str]:
    more = len(lines) - NAMED
    return lines[:NAMED] + ([f"... and {more} more like it"] if more > 0 else [])
