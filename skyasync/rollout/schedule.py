"""The schedule of a run: what its course depended on besides the settings and the seed, a few bytes per group.

With the embedded engine a token depends on the prompt, the request's random stream, the weights that computed it and
those that computed the cache. The other requests of its batch, the engine and the clock do not change it, bitwise. A
training step depends on its groups, their order, and which of them were trained together. So a step's line in
``schedule.jsonl`` has these groups, and of each sample the version of its weights from which token on.

    {"step": 3, "position": 12, "groups": [["e0-i4", 1, 9, "5f0c1d2e3a4b5c6d", [["1"], ["1 17:2"]]], ...]}

A group is: name, policy version when it was started, number of its arrival, digest, and by sample the changes of each
turn. ``1 17:2`` began with version 1, and its tokens from 17 on are of version 2. ``1 17!2`` was continued there as
a new request (an engine had failed, or ``partial_rollout=recompute``). If all is of the first version there is no list.

Pure. Invariant: what is parsed equals what was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash

from skyasync.inference.interface import GenerationOutput
from skyasync.rollout.types import Group, Segment, Trajectory

FILE, FOLDER = "schedule.jsonl", "schedule"
_CHANGE = re.compile(r"(\d*)([:!]?)(\d+)")


class Change(NamedTuple):
    """From this token of a response on: weights of this version; ``cut``: as a new request."""

    token: int
    version: int
    cut: bool = False


Turn = tuple[Change, ...]


def changes_of(response: Segment | GenerationOutput) -> Turn:
    """Where the weights or the request of a response changed; the first is token 0, if there are tokens."""
    versions, cuts = response.versions, response.cuts
    if not len(versions):
        return ()
    if not cuts and (versions == versions[0]).all():  # so it is of most
        return (Change(0, int(versions[0])),)
    starts = (np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()
    tokens = sorted({0, *starts, *(cut for cut in cuts if cut < len(versions))})
    return tuple(Change(token, int(versions[token]), token in cuts) for token in tokens)


def turn_text(turn: Turn) -> str:
    return " ".join(
        f"{change.token or ''}{'!' if change.cut else ':' if change.token else ''}{change.version}" for change in turn
    )


def parse_turn(text: str) -> Turn:
    parts = (match.groups() for match in map(_CHANGE.fullmatch, text.split()) if match)
    return tuple(
        Change(int(token or 0), int(version), mark == "!") if mark else Change(0, int(token + version))
        for token, mark, version in parts
    )


@dataclass(frozen=True)
class ScheduledGroup:
    """A group of a step.

    Args:
        started: the policy version when it was started.
        arrival: so many groups had arrived before it.
        digest: of its tokens, log-probabilities, versions and rewards.
        samples: the turns of each sample; None if an episode of the group has failed, which cannot be generated again.
    """

    name: str
    started: int
    arrival: int
    digest: str
    samples: tuple[tuple[Turn, ...], ...] | None = ()

    @classmethod
    def of(cls, group: Group, started: int, arrival: int) -> ScheduledGroup:
        failed = any(trajectory.metrics.get("given_up") for trajectory in group.trajectories)
        samples = tuple(tuple(map(changes_of, trajectory.actions)) for trajectory in group.trajectories)
        own = None if failed else samples
        return cls(str(group.prompt.id), started, arrival, digest(group.trajectories), own)

    @property
    def oldest(self) -> int:
        """The lowest version of its tokens; -1 if it has a failed episode."""
        if self.samples is None:
            return -1
        return min((turn[0].version for turns in self.samples for turn in turns if turn), default=self.started)

    @property
    def versions(self) -> set[int]:
        """The policy versions of its tokens."""
        return {self.started} | {c.version for turns in self.samples or () for turn in turns for c in turn}

    def turn(self, repetition: int, number: int) -> Turn:
        """A turn of a sample. A turn that was not recorded has the last weights of the turn before it."""
        turns = self.samples[repetition] if self.samples and repetition < len(self.samples) else ()
        if number < len(turns) and turns[number]:
            return turns[number]
        before = next((turn[-1] for turn in reversed(turns[:number]) if turn), None)
        return (Change(0, before.version if before else self.oldest),)

    def row(self) -> list[Any]:
        """The group as a JSON list."""
        row = [self.name, self.started, self.arrival, self.digest]
        if self.samples is None:
            return [*row, None]
        plain = all(turn == (Change(0, self.started),) for turns in self.samples for turn in turns)
        return row if plain else [*row, [[turn_text(turn) for turn in turns] for turns in self.samples]]

    @classmethod
    def parse(cls, row: Sequence[Any]) -> ScheduledGroup:
        name, started, arrival, digest, *changes = row
        if changes == [None]:
            return cls(name, started, arrival, digest, None)
        return cls(name, started, arrival, digest, tuple(tuple(map(parse_turn, turns)) for turns in chain(*changes)))


@dataclass(frozen=True)
class ScheduledStep:
    """A training step.

    Args:
        positions: of the prompts that it consumes (see ``Rollout``).
        groups: in the order in which they were trained.
        parts: the names of those that were trained together, if it was not all of them at once.
        whole: names of groups that are in a file, since they cannot be generated again from everywhere.
    """

    step: int
    positions: tuple[int, ...]
    groups: tuple[ScheduledGroup, ...]
    parts: tuple[tuple[str, ...], ...]
    whole: frozenset[str] = frozenset()

    def row(self) -> dict[str, Any]:
        """The step as a JSON object, without its number."""
        names = tuple(group.name for group in self.groups)
        row: dict[str, Any] = {"positions": list(self.positions), "groups": [group.row() for group in self.groups]}
        others = {"whole": sorted(self.whole)}
        others["parts"] = [] if self.parts == (names,) else list(map(list, self.parts))
        return row | {name: value for name, value in others.items() if value}

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> ScheduledStep:
        groups = tuple(map(ScheduledGroup.parse, row["groups"]))
        parts = tuple(map(tuple, row.get("parts", ()))) or (tuple(group.name for group in groups),)
        whole = frozenset(row.get("whole", ()))
        return cls(row["step"], tuple(row["positions"]), groups, parts, whole)


def digest(trajectories: Iterable[Trajectory]) -> str:
    """Digest of everything that is trained: equal digests mean equal samples."""
    segments = [segment for trajectory in trajectories for sequence in trajectory.sequences for segment in sequence]
    state = xxhash.xxh3_64(repr([(s.kind, len(s.tokens), float(s.reward)) for s in segments]).encode())
    for segment in segments:
        for values in (segment.tokens, segment.logprobs, segment.versions):
            if len(values):
                state.update(np.ascontiguousarray(values).data)
    return state.hexdigest()
