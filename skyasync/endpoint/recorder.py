"""The calls of one episode, as training sequences.

Invariant: what is trained is what was sampled. Every call's tokens, log-probabilities and versions stand in exactly one
sequence, as one action, behind exactly the tokens that the engine had read; nothing is made again from text.

    calls (prompt | reply)           sequences
    p | a                            p a o b             a call that begins with all of an earlier one extends it;
    p a o | b                        p a o q c d         the first to do so goes on with its sequence. Any other call
    p a o q | c                        (p a o q is       begins a sequence of its own, in which it learns from its
    p a o q c | d                       context here)    own tokens alone
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from skyasync.arrays import Ints, joined
from skyasync.rollout.types import Segment


@dataclass(frozen=True, eq=False)
class Call:
    """One answered request: what the engine read, what it wrote, why it stopped, and the answer's ``id``."""

    prompt: Ints
    action: Segment
    stop_reason: str = "stop"
    id: str = ""

    @cached_property
    def tokens(self) -> Ints:
        return joined(self.prompt, self.action.tokens)


Thoughts = Mapping[int, str]  # place in a conversation -> the reasoning of the message there
NO_THOUGHTS: Thoughts = MappingProxyType({})


class Recorder:
    """Remembers calls in the order of their answers, and which conversation each of them leads to."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._led_to: dict[tuple[Hashable, ...], list[tuple[Call, Thoughts]]] = {}

    def record(self, call: Call, conversation: Sequence[Hashable] = (), thoughts: Thoughts = NO_THOUGHTS) -> None:
        """Add a call.

        Args:
            conversation: the messages that were asked with, and the reply behind them; empty if there are none.
            thoughts: the reasoning of those that have any.
        """
        self.calls.append(call)
        if conversation:
            self._led_to.setdefault(tuple(conversation), []).append((call, thoughts))

    def extended_by(
        self, conversation: Sequence[Hashable], thoughts: Thoughts = NO_THOUGHTS
    ) -> tuple[Call, int] | None:
        """The call whose conversation is the longest beginning of this one, and that beginning's length.

        Reasoning that is not sent back is as it was; reasoning that is sent back must be as it was.
        """
        for length in range(len(conversation), 0, -1):
            sent = {place: thought for place, thought in thoughts.items() if place < length}
            for call, known in reversed(self._led_to.get(tuple(conversation[:length]), [])):
                if all(known.get(place, "") == thought for place, thought in sent.items()):
                    return call, length
        return None


def sequences(calls: Sequence[Call]) -> list[list[Segment]]:
    """The training sequences, in the order in which they ended: the last one has the last call."""
    chains: list[list[Call]] = []
    for call in calls:
        extended = max(_extended(chains, call), key=lambda chain: len(chain[-1].tokens), default=None)
        if extended is None:
            chains.append([call])
        else:
            chains.remove(extended)
            chains.append([*extended, call])
    return [_segments(chain) for chain in chains]


def _extended(chains: list[list[Call]], call: Call) -> Iterator[list[Call]]:
    """The chains all of whose tokens the call's prompt begins with."""
    for chain in chains:
        tokens = chain[-1].tokens
        if np.array_equal(call.prompt[: len(tokens)], tokens):
            yield chain


def _segments(chain: list[Call]) -> list[Segment]:
    found: list[Segment] = []
    done = 0
    for call in chain:
        between = call.prompt[done:]
        if len(between):
            found.append(Segment("observation" if found else "prompt", between))
        known = sum(len(s.experts) for s in found if s.experts is not None)
        experts = None if call.action.experts is None else call.action.experts[known:]
        found.append(replace(call.action, experts=experts) if known else call.action)
        done = len(call.tokens)
    return found
