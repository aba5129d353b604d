"""Episodes that are being played, for checkpoints, and those that a checkpoint had: what the model wrote is not asked
for again.

Invariant: a turn is taken from the record only if the model reads there, token by token, what it read before. An
environment is always played again, from its beginning; where it says something else, what follows is generated anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from skyasync.arrays import Ints, joined, joined_experts
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationOutput
from skyasync.rollout.types import Trajectory, TrajectoryId, action_of


class Turn(NamedTuple):
    """What the model read, and what it wrote then; without a ``finish_reason`` it was still at it."""

    read: Ints
    wrote: GenerationOutput


class Begun:
    """What the generator of a run keeps of its episodes."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._playing: dict[TrajectoryId, Trajectory] = {}
        self._recorded: dict[TrajectoryId, list[Turn]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """It is played, or has been and its group is not complete."""
        self._playing[trajectory.id] = trajectory

    def remove(self, identities: Iterable[TrajectoryId]) -> None:
        for identity in identities:
            self._playing.pop(identity, None)
            self._recorded.pop(identity, None)

    async def now(self) -> list[Trajectory]:
        """Copies of what is played, with the tokens that the engines have by now."""
        if not self._playing:
            return []
        so_far = await self._client.progress()
        return [_copy(each, so_far) for each in self._playing.values() if not each.metrics.get("given_up")]

    def give_back(self, trajectories: Sequence[Trajectory]) -> None:
        """Of a checkpoint: they go on from there when they are asked for."""
        self._recorded = {each.id: list(_turns(each)) for each in trajectories}

    def again(self, trajectory: Trajectory) -> None:
        """Its environment is lost, and it is played from its beginning, with what the model has written so far."""
        played = list(_turns(_copy(trajectory, {})))
        if len(played) > len(self._recorded.get(trajectory.id, [])):  # else it was lost before its record's end
            self._recorded[trajectory.id] = played

    def turn(self, identity: TrajectoryId, number: int, read: Ints, *, seeded: bool) -> GenerationOutput | None:
        """What is recorded of this turn. With a seed half a response is made again: it comes out the same."""
        turns = self._recorded.get(identity, [])
        if number >= len(turns):
            return None
        same = np.array_equal(turns[number].read, read)
        found = turns[number].wrote
        if not same or (seeded and found.finish_reason is None):
            del turns[number:]
            return None
        return found


def _copy(trajectory: Trajectory, so_far: dict[str, GenerationOutput]) -> Trajectory:
    segments = [replace(segment) for segment in trajectory.segments]
    branches = [[replace(segment) for segment in branch] for branch in trajectory.branches]
    copy = Trajectory(trajectory.id, segments, trajectory.stop_reason, dict(trajectory.metrics), branches)
    wrote = so_far.get(request_id(trajectory.id, len(copy.actions)))
    if wrote is not None and len(wrote.token_ids):
        segments.append(action_of(wrote, segments))
        copy.stop_reason = "abort"
    return copy


def _turns(trajectory: Trajectory) -> Iterator[Turn]:
    last = trajectory.actions[-1] if trajectory.actions else None
    for sequence in trajectory.sequences:
        for place, segment in enumerate(sequence):
            if segment.kind != "action":
                continue
            reason = "stop" if segment is not last else trajectory.stop_reason
            wrote = GenerationOutput("", segment.tokens, segment.logprobs, segment.versions)
            wrote.experts = joined_experts(before.experts for before in sequence[: place + 1])
            if reason in ("stop", "length"):
                wrote.finish_reason = "length" if reason == "length" else "stop"
            yield Turn(joined(*(before.tokens for before in sequence[:place])), wrote)


def request_id(identity: TrajectoryId, turn: int) -> str:
    """How the engines know a turn of an episode."""
    return f"{identity}-t{turn}"
