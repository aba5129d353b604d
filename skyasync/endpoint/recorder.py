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

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
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
        self._led_to: dict[bytes, list[tuple[Call, Thoughts]]] = {}  # by a digest of the conversation

    def record(self, call: Call, conversation: Sequence[str] = (), thoughts: Thoughts = NO_THOUGHTS) -> None:
        """Add a call.

        Args:
            conversation: the messages that were asked with, and the reply behind them; empty if there are none.
            thoughts: the reasoning of those that have any.
        """
        self.calls.append(call)
        if conversation:
            *_, digest = _digests(conversation)
            self._led_to.setdefault(digest, []).append((call, thoughts))

    def extended_by(self, conversation: Sequence[str], thoughts: Thoughts = NO_THOUGHTS) -> tuple[Call, int] | None:
        """The call whose conversation is the longest beginning of this one, and that beginning's length.

        Reasoning that is not sent back is as it was; reasoning that is sent back must be as it was.
        """
        digests = list(_digests(conversation))
        for length in range(len(conversation), 0, -1):
            for call, known in reversed(self._led_to.get(digests[length - 1], [])):
                if all(known.get(place, "") == thought for place, thought in thoughts.items() if place < length):
                    return call, length
        return None


def _digests(conversation: Iterable[str]) -> Iterator[bytes]:
    """Of each of its beginnings, from that of one item on: in time and memory that grow with its length, not faster."""
    digest = b""
    for item in conversation:
        digest = sha256(digest + item.encode()).digest()
        yield digest


def sequences(calls: Sequence[Call]) -> list[list[Segment]]:
    """The training sequences, in the order in which they ended: the last one has the last call."""
    chains: list[list[Call]] = []
    ended: list[int] = []  # at which call
    lengths, sums = np.zeros(len(calls), np.int64), np.zeros(len(calls), np.uint64)  # of the chains' tokens
    for number, call in enumerate(calls):
        prefixes = _prefix_sums(call.tokens)
        count = len(chains)
        within = np.flatnonzero(lengths[:count] <= len(call.prompt))
        found = within[prefixes[lengths[within]] == sums[within]]
        chain = min(found.tolist(), key=lambda index: (-lengths[index], ended[index]), default=count)
        if chain == count:
            chains.append([])
            ended.append(number)
        chains[chain].append(call)
        ended[chain], lengths[chain], sums[chain] = number, len(call.tokens), prefixes[-1]
    return [_segments(chains[index]) for index in sorted(range(len(chains)), key=ended.__getitem__)]


_SECRET = secrets.randbits(64)


def _prefix_sums(tokens: Ints) -> np.ndarray:
    """A hash of each beginning of the tokens, the empty one first: a sum of pseudo-random numbers, one for each token
    at its place, which a secret keeps from being foreseen (SplitMix64's finalizer; wrong with probability 2**-64)."""
    mixed = (tokens.astype(np.uint64) << np.uint64(32)) + np.arange(len(tokens), dtype=np.uint64) ^ np.uint64(_SECRET)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])


def _segments(chain: list[Call]) -> list[Segment]:
    found: list[Segment] = []
    done = known = 0
    for call in chain:
        between = call.prompt[done:]
        if len(between):
            found.append(Segment("observation" if found else "prompt", between))
        experts = None if call.action.experts is None else call.action.experts[known:]
        found.append(replace(call.action, experts=experts) if known else call.action)
        known += 0 if experts is None else len(experts)
        done = len(call.tokens)
    return found
