"""Partial rollouts: what a checkpoint keeps of rollouts, and how a resumed run continues them.

    running episodes ──PartialRollouts.now──▶ RolloutState ──write──▶ rollouts.safetensors
    resumed episodes ◀──PartialRollouts.turn── RolloutState ◀──read──┘

Invariant: what is read equals what was written: tokens, log-probabilities and versions are bitwise
identical. The file holds identities of prompts, not their texts, and each image once; nothing in it
is executed. A turn is taken from the record only if the model reads there, token by token and image
by image, what it read before. An environment is always played again from its beginning; if it says
something else, what follows is generated again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import safe_open, save_file

from skyasync.arrays import Ints, joined, joined_experts
from skyasync.errors import UserError, headline
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationOutput
from skyasync.models.images import Image, Images
from skyasync.rollout.types import (
    Group,
    Prompt,
    PromptId,
    Segment,
    Trajectory,
    TrajectoryId,
    action_of,
    images_in,
)

FILE = "rollouts.safetensors"
_KIND_NAMES: tuple[Literal["prompt", "action", "observation"], ...] = (
    "prompt",
    "action",
    "observation",
)


def request_id(identity: TrajectoryId, turn: int) -> str:
    """The engines' name of a turn of an episode."""
    return f"{identity}-t{turn}"


class RecordedTurn(NamedTuple):
    """What the model read, and what it then wrote; without a ``finish_reason`` the turn was in
    flight."""

    read: Ints
    images: Images
    wrote: GenerationOutput


class PartialRollouts:
    """The episodes in flight of a generator, and the turns that are known of resumed ones."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._running: dict[TrajectoryId, Trajectory] = {}
        self._recorded: dict[TrajectoryId, list[RecordedTurn]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Keep an episode until it is removed: also a finished one, while its group is not
        complete."""
        self._running[trajectory.id] = trajectory

    def remove(self, identities: Iterable[TrajectoryId]) -> None:
        for identity in identities:
            self._running.pop(identity, None)
            self._recorded.pop(identity, None)

    async def now(self) -> list[Trajectory]:
        """Copies of the trajectories, with the tokens that the engines have so far."""
        if not self._running:
            return []
        progress = await self._client.progress()
        copies = [
            each.copy() for each in self._running.values() if not each.metrics.get("given_up")
        ]
        for copy in copies:
            wrote = progress.get(request_id(copy.id, len(copy.actions)))
            if wrote is not None and len(wrote.token_ids):
                copy.segments.append(action_of(wrote, copy.segments))
                copy.stop_reason = "abort"
        return copies

    def resume(self, trajectories: Sequence[Trajectory]) -> None:
        """Episodes of a checkpoint continue from there when they are requested."""
        self._recorded = {each.id: list(_turns(each)) for each in trajectories}

    def knows(self, identity: TrajectoryId) -> bool:
        """Whether turns of this episode are recorded."""
        return identity in self._recorded

    def restart(self, trajectory: Trajectory) -> None:
        """Prepare an episode whose environment is lost: it is played again with what the model has
        written so far."""
        played = list(_turns(trajectory))
        if len(played) > len(
            self._recorded.get(trajectory.id, [])
        ):  # else it was lost before the end of its record
            self._recorded[trajectory.id] = played
        trajectory.restart()

    def turn(
        self, identity: TrajectoryId, number: int, read: Ints, images: Images, *, seeded: bool
    ) -> GenerationOutput | None:
        """What is recorded of this turn. With a seed a partial response is generated again: it is
        the same."""
        turns = self._recorded.get(identity, [])
        if number >= len(turns):
            return None
        before, seen, wrote = turns[number]
        same = (
            np.array_equal(before, read) and seen == images
        )  # others may have placeholders as many
        if not same or (seeded and wrote.finish_reason is None):
            del turns[number:]
            return None
        return wrote


def _turns(trajectory: Trajectory) -> Iterator[RecordedTurn]:
    last = trajectory.actions[-1] if trajectory.actions else None
    for sequence in trajectory.sequences:
        for place, segment in enumerate(sequence):
            if segment.kind != "action":
                continue
            if segment is not last:
                reason = "stop"
            else:
                reason = trajectory.stop_reason
            wrote = GenerationOutput("", segment.tokens, segment.logprobs, segment.versions)
            wrote.experts = joined_experts(before.experts for before in sequence[: place + 1])
            if reason in ("stop", "length"):
                if reason == "length":
                    wrote.finish_reason = "length"
                else:
                    wrote.finish_reason = "stop"
            read = joined(*(before.tokens for before in sequence[:place]))
            images = images_in(sequence[:place])
            yield RecordedTurn(read, images, wrote)


# ---------------------------------------------------------------- the file


class RolloutState(NamedTuple):
    """What a checkpoint keeps of rollouts.

    Args:
        versions: started prompt -> the policy version at its start.
        groups: those that are complete and not trained yet, by prompt.
        partial: trajectories in flight, with their tokens so far.
    """

    versions: Mapping[PromptId, int]
    groups: Sequence[Group]
    partial: Sequence[Trajectory] = ()

    @property
    def trajectories(self) -> list[Trajectory]:
        """In the order of the file."""
        return [*(t for group in self.groups for t in group.trajectories), *self.partial]

    @property
    def tokens(self) -> int:
        return sum(
            len(s.tokens) for t in self.trajectories for sequence in t.sequences for s in sequence
        )


def write(file: Path, state: RolloutState) -> None:
    """Write one file.

    Raises:
        OSError: if the disk does not take it.
    """
    segments = [s for t in state.trajectories for sequence in t.sequences for s in sequence]
    images = list(dict.fromkeys(images_in(segments)))  # each once
    numbers = {image: number for number, image in enumerate(images)}
    index = {
        "versions": [[*identity, version] for identity, version in state.versions.items()],
        "groups": [
            [*group.prompt.id, [_entry(t, numbers) for t in group.trajectories]]
            for group in state.groups
        ],
        "partial": [[*t.id.prompt, _entry(t, numbers)] for t in state.partial],
        "images": [len(image.data) for image in images],
    }
    arrays = {
        "tokens": joined(*(s.tokens for s in segments)),
        "versions": joined(*(s.versions for s in segments)),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *(s.logprobs for s in segments)]),
    }
    if images:
        arrays["images"] = np.frombuffer(b"".join(image.data for image in images), np.uint8)
    experts = joined_experts(s.experts for s in segments)
    if experts is not None:
        arrays["experts"] = experts
    try:
        save_file(arrays, str(file), metadata={"index": json.dumps(index)})
    except SafetensorError as error:  # arrays are always sound, so it can only be the disk
        raise OSError(f"{file.name} could not be written: {error}") from error


def _entry(trajectory: Trajectory, numbers: Mapping[Image, int]) -> dict[str, Any]:
    def about(segment: Segment) -> list[Any]:
        if segment.experts is None:
            experts = None
        else:
            experts = len(segment.experts)
        shown = [numbers[image] for image in segment.images]
        return [
            _KIND_NAMES.index(segment.kind),
            len(segment.tokens),
            segment.reward,
            experts,
            shown,
        ]

    return {
        "repetition": trajectory.id.repetition,
        "stop_reason": trajectory.stop_reason,
        "metrics": trajectory.metrics,
        "sequences": [
            [about(segment) for segment in sequence] for sequence in trajectory.sequences
        ],
    }


def read(file: Path, prompt: Callable[[PromptId], Prompt]) -> RolloutState:
    """What ``write`` wrote.

    Args:
        prompt: the prompt of the dataset, by its identity.
    """
    try:
        with safe_open(str(file), "np") as opened:
            index = json.loads(opened.metadata()["index"])
            names = opened.keys()
            arrays = {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is damaged, or no file of rollouts: {headline(error)}") from error
    offsets = Counter[str]()  # arrays are read from the start to the end

    def values(name: str, length: int) -> Any:  # noqa: ANN401  (arrays of several types)
        offsets[name] += length
        return arrays[name][offsets[name] - length : offsets[name]]

    images = [Image(values("images", length).tobytes()) for length in index["images"]]

    def segment(
        kind: int,
        length: int,
        reward: float,
        experts: int | None,
        shown: Sequence[int],
    ) -> Segment:
        tokens = values("tokens", length)
        if _KIND_NAMES[kind] != "action":
            return Segment(
                _KIND_NAMES[kind], tokens, reward=reward, images=tuple(images[n] for n in shown)
            )
        logprobs = values("logprobs", length)
        versions = values("versions", length)
        if experts is not None and "experts" in arrays:
            known = values("experts", experts)
        else:
            known = None
        return Segment("action", tokens, logprobs, versions, reward, known)

    def trajectory(identity: PromptId, entry: Mapping[str, Any]) -> Trajectory:
        *branches, segments = [
            [segment(*about) for about in sequence] for sequence in entry["sequences"]
        ]
        own = TrajectoryId(identity, entry["repetition"])
        return Trajectory(own, segments, entry["stop_reason"], dict(entry["metrics"]), branches)

    groups = []
    for epoch, row, entries in index["groups"]:
        identity = PromptId(epoch, row)
        groups.append(Group(prompt(identity), [trajectory(identity, entry) for entry in entries]))
    partial = [trajectory(PromptId(epoch, row), entry) for epoch, row, entry in index["partial"]]
    return RolloutState(
        {PromptId(epoch, row): version for epoch, row, version in index["versions"]},
        groups,
        partial,
    )
