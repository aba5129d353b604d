"""The kinds of faults, and a schedule of faults that depends on its seed only.

Pure: no clock, no I/O. Invariant: the same arguments give the same events, in the order of their times. A longer
schedule begins with the shorter one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from skyasync.errors import UserError, unknown

FOREVER = math.inf
SHORT_S = 3.0  # mean duration of faults that end after some time
HANGS = (
    0.3  # share of stopped processes that are never continued, if the library has to detect that
)


@dataclass(frozen=True)
class Kind:
    """A kind of event.

    Args:
        deed: the action.
        target: the part that it applies to.
        weight: relative frequency.
        passes: it ends after some time.
        may_hang: it may last forever, since the library has to detect it.
        inside: the run's own controller does it by order (``tests.chaos.fault_hooks``).
        ends: words of the error with which it may end the run; "" if the run must continue.
    """

    deed: str
    target: str
    weight: float = 1.0
    passes: bool = False
    may_hang: bool = False
    inside: bool = False
    ends: str = ""


#: The kinds of events, by name.
KINDS: dict[str, Kind] = {
    "kill-engine": Kind("kill", "engine", 2.0),
    "kill-rank": Kind("kill", "rank"),
    "kill-environment": Kind("kill", "environment"),
    "kill-controller": Kind("kill", "controller", 0.5),
    "kill-driver": Kind("kill", "driver", 0.5),
    "freeze-engine": Kind("freeze", "engine", passes=True, may_hang=True),
    "freeze-rank": Kind("freeze", "rank", passes=True, may_hang=True),
    "freeze-environment": Kind("freeze", "environment", passes=True, may_hang=True),
    "freeze-controller": Kind("freeze", "controller", 0.5, passes=True, may_hang=True),
    "freeze-driver": Kind("freeze", "driver", 0.5, passes=True),
    "drop-messages": Kind("drop", "messages", passes=True, inside=True),
    "delay-messages": Kind("delay", "messages", passes=True, inside=True),
    "fill-disk": Kind(
        "fill", "disk", passes=True, inside=True, ends="UserError: the checkpoint of step "
    ),
    "flip-bit": Kind("flip a bit in", "weights", 0.5, inside=True, ends="WeightSyncError: "),
}


@dataclass(frozen=True)
class Event:
    """One fault.

    Args:
        at: seconds from the beginning.
        lasts: seconds until it is undone; 0 if there is nothing to undo, ``FOREVER`` if it is never undone.
        pick: from 0 to 1, selects one of several processes.
    """

    number: int
    at: float
    kind: str
    lasts: float = 0.0
    pick: float = 0.0

    @property
    def about(self) -> Kind:
        return KINDS[self.kind]

    @property
    def hangs(self) -> bool:
        """It is never undone: the run has to detect it."""
        return self.lasts == FOREVER


def weights_of(names: Mapping[str, float] | None = None) -> dict[str, float]:
    """The requested kinds with their weights; all of ``KINDS`` without a request.

    Raises:
        UserError: for an unknown name, a weight below 0, and if no kind is left.
    """
    asked = {name: kind.weight for name, kind in KINDS.items()} if names is None else dict(names)
    for name, weight in asked.items():
        if name not in KINDS:
            raise UserError(unknown("kind of event", name, KINDS))
        if not 0 <= weight < math.inf:
            raise UserError(
                f"{name}={weight:g}: the weight of a kind of event is a number from 0 on"
            )
    if not any(asked.values()):
        raise UserError("no kind of event is left: give at least one a weight above 0")
    return asked


def endless(
    seed: int, mean_s: float, weights: Mapping[str, float] | None = None
) -> Iterator[Event]:
    """An endless series of events. Gaps are exponential, so no event predicts the time of the next one.

    Args:
        mean_s: mean of the gaps.
        weights: by kind (``KINDS``); by default the weights of ``KINDS``.
    """
    if not 0 < mean_s < math.inf:
        raise UserError(f"{mean_s:g} s between events: it takes a number above 0")
    chance, asked, at = random.Random(seed), weights_of(weights), 0.0
    names, shares = list(asked), list(asked.values())
    for number in count(1):
        at += chance.expovariate(1 / mean_s)
        name = chance.choices(names, shares)[0]
        lasts, hangs, pick = (
            chance.expovariate(1 / SHORT_S),
            chance.random() < HANGS,
            chance.random(),
        )
        kind = KINDS[name]
        end = FOREVER if kind.may_hang and hangs else lasts if kind.passes else 0.0
        yield Event(number, at, name, end, pick)


def schedule(
    seed: int, mean_s: float, length_s: float, weights: Mapping[str, float] | None = None
) -> list[Event]:
    """The events of the first ``seconds``; see ``endless``."""
    events = []
    for event in endless(seed, mean_s, weights):
        if event.at >= length_s:
            break
        events.append(event)
    return events
