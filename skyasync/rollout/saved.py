"""Groups of trajectories in a file of a checkpoint, and back.

Invariant: what is read is equal to what was written: tokens, log-probabilities and versions bit for bit. The prompts
themselves are not in it, only their identity: their texts are the dataset's. Arrays are safetensors; nothing in the
file is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import safe_open, save_file

from skyasync.arrays import Experts, Floats, Ints, joined, joined_experts
from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId

FILE = "rollouts.safetensors"
KINDS: tuple[Literal["prompt", "action", "observation"], ...] = ("prompt", "action", "observation")


class Kept(NamedTuple):
    """What a checkpoint keeps of rollouts.

    Args:
        versions: prompt that was begun -> the policy version then.
        groups: those that are complete and untrained, by prompt.
        begun: trajectories in flight, with their tokens so far.
    """

    versions: Mapping[PromptId, int]
    groups: Sequence[Group]
    begun: Sequence[Trajectory] = ()

    @property
    def trajectories(self) -> list[Trajectory]:
        return [*(t for group in self.groups for t in group.trajectories), *self.begun]

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for t in self.trajectories for sequence in t.sequences for s in sequence)


def write(file: Path, kept: Kept) -> None:
    """All of it, as one file.

    Raises:
        OSError: if the disk does not take it.
    """
    segments = [s for t in kept.trajectories for sequence in t.sequences for s in sequence]
    index = {
        "versions": [[*identity, version] for identity, version in kept.versions.items()],
        "groups": [[*group.prompt.id, [_entry(t) for t in group.trajectories]] for group in kept.groups],
        "begun": [[*t.id.prompt, _entry(t)] for t in kept.begun],
    }
    arrays = {
        "tokens": joined(*(s.tokens for s in segments)),
        "versions": joined(*(s.versions for s in segments)),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *(s.logprobs for s in segments)]),
    }
    if (experts := joined_experts(s.experts for s in segments)) is not None:
        arrays["experts"] = experts
    try:
        save_file(arrays, str(file), metadata={"index": json.dumps(index)})
    except SafetensorError as error:  # arrays are always sound, so it can only be the disk
        raise OSError(f"{file.name} could not be written: {error}") from error


def read(file: Path, prompt: Callable[[PromptId], Prompt]) -> Kept:
    """What ``write`` wrote.

    Args:
        prompt: the dataset's, by its identity.
    """
    with safe_open(str(file), "np") as opened:
        index = json.loads(opened.metadata()["index"])
        pieces = _Pieces(*(opened.get_tensor(name) for name in ("tokens", "versions", "logprobs")))
        if "experts" in opened.keys():  # noqa: SIM118  (it is no dictionary)
            pieces.experts = opened.get_tensor("experts")
    groups = []
    for epoch, row, entries in index["groups"]:
        identity = PromptId(epoch, row)
        groups.append(Group(prompt(identity), [pieces.trajectory(identity, entry) for entry in entries]))
    begun = [pieces.trajectory(PromptId(epoch, row), entry) for epoch, row, entry in index["begun"]]
    return Kept({PromptId(epoch, row): version for epoch, row, version in index["versions"]}, groups, begun)


def _entry(trajectory: Trajectory) -> dict[str, Any]:
    sequences = [
        [[KINDS.index(s.kind), len(s.tokens), s.reward, *_known(s)] for s in sequence]
        for sequence in trajectory.sequences
    ]
    return {
        "repetition": trajectory.id.repetition,
        "stop_reason": trajectory.stop_reason,
        "metrics": trajectory.metrics,
        "sequences": sequences,
    }


def _known(segment: Segment) -> list[int]:
    return [] if segment.experts is None else [len(segment.experts)]


class _Pieces:
    """The arrays of a file, handed out from their beginning."""

    experts: Experts | None = None

    def __init__(self, tokens: Ints, versions: Ints, logprobs: Floats) -> None:
        self._tokens, self._versions, self._logprobs = tokens, versions, logprobs
        self._token = self._action = self._routed = 0  # how many have been handed out

    def trajectory(self, prompt: PromptId, entry: Mapping[str, Any]) -> Trajectory:
        *branches, segments = [list(self._segments(sequence)) for sequence in entry["sequences"]]
        identity = TrajectoryId(prompt, entry["repetition"])
        return Trajectory(identity, segments, entry["stop_reason"], dict(entry["metrics"]), branches)

    def _segments(self, sequence: Sequence[Sequence[Any]]) -> Iterator[Segment]:
        for kind, length, reward, *known in sequence:
            tokens = self._tokens[self._token : self._token + length]
            self._token += length
            if KINDS[kind] != "action":
                yield Segment(KINDS[kind], tokens, reward=reward)
                continue
            own = slice(self._action, self._action + length)
            self._action += length
            experts = None
            if known and self.experts is not None:
                experts = self.experts[self._routed : self._routed + known[0]]
                self._routed += known[0]
            yield Segment("action", tokens, self._logprobs[own], self._versions[own], reward, experts)
