"""Groups are bitwise unchanged after saving and loading."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.arrays import ints
from skyasync.inference.client import InferenceClient
from skyasync.models.images import Image
from skyasync.rollout import partial_rollouts as saved
from skyasync.rollout.types import Group, Prompt, PromptId, Segment, Trajectory, TrajectoryId
from tests.full_disk import files_end_at

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
FLOATS = st.floats(-50, 0, width=32)
KNOWN = [Image(name * 500) for name in (b"one", b"two", b"three")]
IMAGES = st.lists(st.sampled_from(KNOWN), max_size=3).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    tokens, reward = draw(TOKENS), draw(st.floats(-1e6, 1e6))
    if draw(st.booleans()):
        return Segment("observation", tokens, reward=reward, images=draw(IMAGES))
    logprobs = draw(st.lists(FLOATS, min_size=len(tokens), max_size=len(tokens)))
    known = draw(st.none() | st.integers(0, 6))
    experts = None if known is None else np.full((known, 2, 1), draw(st.integers(0, 255)), np.uint8)
    return Segment(
        "action", tokens, logprobs, [draw(st.integers(0, 9))] * len(tokens), reward, experts
    )


@st.composite
def trajectories(draw: st.DrawFn, prompt: PromptId, repetition: int) -> Trajectory:
    def sequence() -> list[Segment]:
        return [
            Segment("prompt", draw(TOKENS), images=draw(IMAGES)),
            *draw(st.lists(segments(), max_size=3)),
        ]

    branches = [sequence() for _ in range(draw(st.integers(0, 2)))]
    metrics = draw(
        st.dictionaries(
            st.text(max_size=4), st.floats(allow_nan=False, allow_infinity=False), max_size=2
        )
    )
    stop = draw(st.sampled_from(["stop", "length", "abort"]))
    return Trajectory(TrajectoryId(prompt, repetition), sequence(), stop, metrics, branches)


@st.composite
def keeps(draw: st.DrawFn) -> saved.RolloutState:
    identities = draw(
        st.lists(
            st.builds(PromptId, st.integers(0, 3), st.integers(0, 99)), max_size=4, unique=True
        )
    )
    groups = [
        Group(
            prompt_of(identity),
            [draw(trajectories(identity, n)) for n in range(draw(st.integers(1, 3)))],
        )
        for identity in identities[::2]
    ]
    partial = [draw(trajectories(identity, 0)) for identity in identities[1::2]]
    return saved.RolloutState(
        {identity: draw(st.integers(0, 99)) for identity in identities}, groups, partial
    )


def prompt_of(identity: PromptId) -> Prompt:
    return Prompt(identity, [{"role": "user", "content": f"row {identity.row}"}], "env")


@settings(max_examples=50, deadline=None)
@given(keeps())
def test_what_is_read_is_what_was_written(kept: saved.RolloutState) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / saved.FILE
        saved.write(file, kept)
        found = saved.read(file, prompt_of)
    assert found == kept
    for mine, theirs in zip(found.trajectories, kept.trajectories, strict=True):
        for ours, other in zip(mine.actions, theirs.actions, strict=True):
            assert ours.logprobs.dtype == np.float32
            assert ours.logprobs.tobytes() == other.logprobs.tobytes()


def test_an_image_is_kept_once_however_many_samples_have_it(tmp_path: Path) -> None:
    image, identity = (
        Image(bytes(np.random.default_rng(0).integers(0, 256, 50_000, np.uint8))),
        PromptId(0, 0),
    )
    group = Group(
        prompt_of(identity),
        [
            Trajectory(TrajectoryId(identity, n), [Segment("prompt", [1], images=(image, image))])
            for n in range(64)
        ],
    )
    saved.write(tmp_path / saved.FILE, saved.RolloutState({identity: 0}, [group]))
    assert (tmp_path / saved.FILE).stat().st_size < 60_000
    (found,) = saved.read(tmp_path / saved.FILE, prompt_of).groups
    assert all(each.segments[0].images == (image, image) for each in found.trajectories)


def test_a_turn_is_not_taken_over_if_another_image_stood_before_it() -> None:
    one, other, *_ = KNOWN
    identity = TrajectoryId(PromptId(0, 0), 0)
    for shown, kept in ((one, True), (other, False)):
        partial = saved.PartialRollouts(cast(InferenceClient, None))
        action = Segment("action", [5, 6], [-1.0, -1.0], [0, 0])
        partial.resume([Trajectory(identity, [Segment("prompt", [1, 2], images=(one,)), action])])
        turn = partial.turn(identity, 0, ints([1, 2]), (shown,), seeded=False)
        assert (turn is not None) == kept


def test_a_disk_that_does_not_take_it_is_an_error_of_the_disks(tmp_path: Path) -> None:
    """So that it counts for ``trainer.ckpt_patience``, as with every other file of a checkpoint."""
    tokens = list(range(1000))
    partial = Trajectory(TrajectoryId(PromptId(0, 0), 0), [Segment("prompt", tokens)])
    with (
        files_end_at(100),
        pytest.raises(OSError, match=r"rollouts\.safetensors could not be written: .*too large"),
    ):
        saved.write(tmp_path / saved.FILE, saved.RolloutState({PromptId(0, 0): 0}, [], [partial]))
