"""What a generator is, and how the trajectories of one become groups.

Invariant: whichever way they come, each group has as many trajectories as asked, in the order asked, and every
trajectory is whole: a prompt to start from, no empty segment behind it, finite log-probabilities.

    ours      roll_out ──▶ trajectories (arrays) ─────────────────────▶ groups
    foreign   generate ──▶ parallel lists ─────────▶ groups_in_turns ─▶ groups
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from skyasync.arrays import TURN_TOKENS
from skyasync.errors import UserError
from skyasync.rollout.convert import generator_output, groups_in_turns
from skyasync.rollout.types import GeneratorInput, GeneratorOutput, Group, Prompt, Segment, Trajectory

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class Generator(Protocol):
    """Anything that turns prompts into trajectories; override ``BasePPOExp.get_generator`` to use your own."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput: ...


class TrajectoryGenerator:
    """A generator that hands over trajectories. Nothing is copied into lists, unless ``generate`` is overridden."""

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        """Every trajectory asked for, in the order asked."""
        raise NotImplementedError

    async def begun(self) -> list[Trajectory]:
        """What is played at this moment, with the tokens so far, for a checkpoint; those left out begin anew."""
        return []

    def go_on_from(self, trajectories: Sequence[Trajectory]) -> None:
        """What ``begun`` gave to the checkpoint that the run goes on from: they need not begin anew."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The same as parallel lists. An override is honoured: the trainer then takes what it returns."""
        return generator_output(await self.roll_out(input_batch))


async def play(
    generator: Generator, request: GeneratorInput, prompts: Sequence[Prompt], version: int
) -> tuple[list[Group], dict[str, float]]:
    """One group per prompt of a request, and the generator's own metrics. Without prompts the generator is not asked.

    Args:
        version: taken for all tokens where a foreign generator gives no ``rollout_versions``.

    Raises:
        UserError: naming the list or the trajectory that is wrong.
    """
    if not prompts:
        return [], {}
    asked = request["trajectory_ids"]
    samples = len(asked) // len(prompts)
    if not hands_over_trajectories(generator):
        output = await generator.generate(request)
        return await groups_in_turns(output, prompts, version, samples), output.get("rollout_metrics") or {}
    trajectories = await generator.roll_out(request)
    if [trajectory.id for trajectory in trajectories] != asked:
        got = [trajectory.id for trajectory in trajectories]
        place = next((n for n, (a, b) in enumerate(zip(asked, got, strict=False)) if a != b), min(len(asked), len(got)))
        found = "".join(
            f", {word} {ids[place]}" for word, ids in (("expected", asked), ("got", got)) if place < len(ids)
        )
        raise UserError(
            f"roll_out() must return one trajectory per entry of trajectory_ids, in that order: expected {len(asked)}, "
            f"got {len(got)}; the first difference is at index {place}{found}"
        )
    done = 0
    for trajectory in trajectories:
        trajectory.branches = [_whole(sequence, trajectory) for sequence in trajectory.branches]
        trajectory.segments = _whole(trajectory.segments, trajectory)
        done += sum(len(segment.tokens) for segment in trajectory.segments)
        if done >= TURN_TOKENS:
            done = 0
            await asyncio.sleep(0)
    parts = [list(trajectories[p * samples : (p + 1) * samples]) for p in range(len(prompts))]
    return [Group(prompt, part) for prompt, part in zip(prompts, parts, strict=True)], {}


def _whole(sequence: list[Segment], trajectory: Trajectory) -> list[Segment]:
    first, *others = sequence
    if first.kind != "prompt" or not len(first.tokens):
        raise UserError(f"{trajectory.id}: the prompt has no tokens")
    for segment in sequence:
        if not np.isfinite(segment.logprobs).all():
            raise UserError(f"{trajectory.id}: log-probabilities of generated tokens must be finite")
    return [first, *(segment for segment in others if len(segment.tokens))]


def hands_over_trajectories(generator: Generator) -> TypeIs[TrajectoryGenerator]:
    """Whether ``generate`` is the plain copy into lists, which no subclass or instance has replaced."""
    return getattr(generator.generate, "__func__", None) is TrajectoryGenerator.generate
