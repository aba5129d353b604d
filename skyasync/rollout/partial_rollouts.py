"""Partial rollouts: the rollouts in a checkpoint, and how a resumed run continues them.

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
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import safe_open, save_file

from skyasync.arrays import NO_FLOATS, Ints, joined, joined_experts
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
    """The input of a model and its response, which has no ``finish_reason`` if it was in flight."""

    read: Ints
    images: Images
    wrote: GenerationOutput


class PartialRollouts:
    """The episodes in flight of a generator, and the turns that are known of resumed ones."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._running: dict[TrajectoryId, Trajectory] = {}
        self._recorded_turns: dict[TrajectoryId, list[RecordedTurn]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Keep an episode until it is removed: a finished one too, until its group is complete."""
        self._running[trajectory.id] = trajectory

    def remove(self, identities: Iterable[TrajectoryId]) -> None:
        for identity in identities:
            self._running.pop(identity, None)
            self._recorded_turns.pop(identity, None)

    async def now(self) -> list[Trajectory]:
        """Copies of the trajectories, with the tokens that the engines have so far."""
        if not self._running:
            return []
        progress = await self._client.progress()
        copies = []
        for trajectory in self._running.values():
            if trajectory.metrics.get("given_up"):  # its environment failed: it is played again
                continue
            copy = trajectory.copy()
            copies.append(copy)
            output = progress.get(request_id(copy.id, len(copy.actions)))
            if output is not None and len(output.token_ids):
                copy.segments.append(action_of(output, copy.segments))
                copy.stop_reason = "abort"  # which ``turn`` reads as a partial response
        return copies

    def resume(self, trajectories: Sequence[Trajectory]) -> None:
        """Let episodes continue from a checkpoint when they are requested."""
        self._recorded_turns = {
            trajectory.id: list(_turns(trajectory)) for trajectory in trajectories
        }

    def knows(self, identity: TrajectoryId) -> bool:
        """Whether turns of this episode are recorded."""
        return identity in self._recorded_turns

    def restart(self, trajectory: Trajectory) -> None:
        """Play an episode again whose environment is lost, with the model's responses so far."""
        turns = list(_turns(trajectory))
        # It may have been lost before the end of its record, which then has more turns.
        if len(turns) > len(self._recorded_turns.get(trajectory.id, [])):
            self._recorded_turns[trajectory.id] = turns
        trajectory.restart()

    def turn(
        self, identity: TrajectoryId, number: int, read: Ints, images: Images, *, seeded: bool
    ) -> GenerationOutput | None:
        """The recorded response of a turn; None if the model reads something else there.

        Args:
            seeded: a partial response is generated again, with the same result.
        """
        turns = self._recorded_turns.get(identity, [])
        if number >= len(turns):
            return None
        recorded_read, recorded_images, wrote = turns[number]
        # Images are compared too: other images may have as many placeholders.
        is_same = np.array_equal(recorded_read, read) and recorded_images == images
        if not is_same or (seeded and wrote.finish_reason is None):
            del turns[number:]
            return None
        return wrote


def _turns(trajectory: Trajectory) -> Iterator[RecordedTurn]:
    actions = trajectory.actions
    for sequence in trajectory.sequences:
        for position, segment in enumerate(sequence):
            if segment.kind != "action":
                continue
            wrote = GenerationOutput("", segment.tokens, segment.logprobs, segment.versions)
            wrote.experts = joined_experts(s.experts for s in sequence[: position + 1])
            # Only the last action can have been cut; the others ended their turns.
            if segment is not actions[-1] or trajectory.stop_reason == "stop":
                wrote.finish_reason = "stop"
            elif trajectory.stop_reason == "length":
                wrote.finish_reason = "length"
            context = sequence[:position]
            yield RecordedTurn(joined(*(s.tokens for s in context)), images_in(context), wrote)


# ---------------------------------------------------------------- the file


class RolloutState(NamedTuple):
    """The rollouts of a checkpoint.

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
        """All trajectories in the order of the file."""
        complete = [trajectory for group in self.groups for trajectory in group.trajectories]
        return [*complete, *self.partial]

    @property
    def segments(self) -> list[Segment]:
        """All segments in the order of the file."""
        return [segment for t in self.trajectories for segment in t.all_segments]

    @property
    def tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)


def write(file: Path, state: RolloutState) -> None:
    """Write one file.

    Raises:
        OSError: if the disk does not take it.
    """
    segments = state.segments
    numbers: dict[Image, int] = {}  # of the images, each once
    for image in images_in(segments):
        numbers.setdefault(image, len(numbers))
    groups = []
    for group in state.groups:
        entries = [_entry(trajectory, numbers) for trajectory in group.trajectories]
        groups.append([*group.prompt.id, entries])
    index = {
        "versions": [[*identity, version] for identity, version in state.versions.items()],
        "groups": groups,
        "partial": [[*t.id.prompt, _entry(t, numbers)] for t in state.partial],
        "images": [len(image.data) for image in numbers],
    }
    arrays = {
        "tokens": joined(*map(attrgetter("tokens"), segments)),
        "versions": joined(*map(attrgetter("versions"), segments)),
        # concatenate needs one array at least
        "logprobs": np.concatenate([NO_FLOATS, *map(attrgetter("logprobs"), segments)]),
    }
    if numbers:
        data = b"".join(image.data for image in numbers)
        arrays["images"] = np.frombuffer(data, np.uint8)
    experts = joined_experts(s.experts for s in segments)
    if experts is not None:
        arrays["experts"] = experts
    try:
        save_file(arrays, str(file), metadata={"index": json.dumps(index)})
    except SafetensorError as error:  # arrays are always sound, so it can only be the disk
        raise OSError(f"{file.name} could not be written: {error}") from error


def _entry(trajectory: Trajectory, image_numbers: Mapping[Image, int]) -> dict[str, Any]:
    """The index entry of a trajectory; its sequences are lists of ``read.segment``'s arguments."""
    sequences = []
    for sequence in trajectory.sequences:
        segments: list[list[Any]] = []
        for segment in sequence:
            kind = _KIND_NAMES.index(segment.kind)
            experts = None if segment.experts is None else len(segment.experts)
            image_indices = [image_numbers[image] for image in segment.images]
            segments.append([kind, len(segment.tokens), segment.reward, experts, image_indices])
        sequences.append(segments)
    return {
        "repetition": trajectory.id.repetition,
        "stop_reason": trajectory.stop_reason,
        "metrics": trajectory.metrics,
        "sequences": sequences,
    }


def read(file: Path, prompt: Callable[[PromptId], Prompt]) -> RolloutState:
    """Read a file that ``write`` wrote.

    Args:
        prompt: the prompt of the dataset, by its identity.
    """
    try:
        with safe_open(str(file), "np") as tensor_file:
            index = json.loads(tensor_file.metadata()["index"])
            names = tensor_file.keys()
            arrays = {name: tensor_file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is damaged, or no file of rollouts: {headline(error)}") from error
    offsets = Counter[str]()  # arrays are read from the start to the end

    def values(name: str, length: int) -> Any:  # noqa: ANN401  (arrays of several types)
        start = offsets[name]
        offsets[name] += length
        return arrays[name][start : start + length]

    images = [Image(values("images", length).tobytes()) for length in index["images"]]

    def segment(
        kind: int,
        length: int,
        reward: float,
        experts: int | None,
        image_indices: Sequence[int],
    ) -> Segment:
        tokens = values("tokens", length)
        if _KIND_NAMES[kind] != "action":
            segment_images = tuple(images[number] for number in image_indices)
            return Segment(_KIND_NAMES[kind], tokens, reward=reward, images=segment_images)
        logprobs = values("logprobs", length)
        versions = values("versions", length)
        segment_experts = None
        if experts is not None and "experts" in arrays:
            segment_experts = values("experts", experts)
        return Segment("action", tokens, logprobs, versions, reward, segment_experts)

    def trajectory(identity: PromptId, entry: Mapping[str, Any]) -> Trajectory:
        sequences = []
        for sequence in entry["sequences"]:
            sequences.append([segment(*arguments) for arguments in sequence])
        *branches, segments = sequences
        name = TrajectoryId(identity, entry["repetition"])
        return Trajectory(name, segments, entry["stop_reason"], dict(entry["metrics"]), branches)

    groups = []
    for epoch, row, entries in index["groups"]:
        identity = PromptId(epoch, row)
        groups.append(Group(prompt(identity), [trajectory(identity, entry) for entry in entries]))
    # In the order of the file: each call takes the next values of the arrays.
    partial = [trajectory(PromptId(epoch, row), entry) for epoch, row, entry in index["partial"]]
    versions = {PromptId(epoch, row): version for epoch, row, version in index["versions"]}
    return RolloutState(versions, groups, partial)
