"""Between trajectories and the generator contract's parallel lists.

Invariant: what a generator returns is checked here, once, with the prompt named; behind this point every
trajectory is whole: as many log-probabilities and versions as generated tokens, and finite rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from skyasync.errors import UserError
from skyasync.rollout.types import GeneratorOutput, Group, Prompt, Segment, Trajectory, TrajectoryId

_PARALLEL = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons")
_PER_TOKEN = ("loss_masks", "rollout_logprobs", "rollout_versions")


def generator_output(trajectories: Sequence[Trajectory]) -> GeneratorOutput:
    """The contract's form of finished trajectories."""
    return {
        "prompt_token_ids": [t.segments[0].tokens for t in trajectories],
        "response_ids": [[token for s in t.segments[1:] for token in s.tokens] for t in trajectories],
        "rewards": [_token_rewards(t) for t in trajectories],
        "loss_masks": [[int(s.kind == "action") for s in t.segments[1:] for _ in s.tokens] for t in trajectories],
        "stop_reasons": [t.stop_reason for t in trajectories],
        "rollout_logprobs": [[p for s in t.segments[1:] for p in _or(s.logprobs, s, 0.0)] for t in trajectories],
        "rollout_versions": [[v for s in t.segments[1:] for v in _or(s.versions, s, -1)] for t in trajectories],
        "trajectory_metrics": [t.metrics for t in trajectories],
    }


def groups_from_output(output: GeneratorOutput, prompts: Sequence[Prompt], version: int) -> list[Group]:
    """One group per prompt, from ``len(prompts) * n`` trajectories in order.

    Args:
        version: taken for all tokens where the generator gives no ``rollout_versions``.

    Raises:
        UserError: naming the list or the prompt that is wrong.
    """
    _check_lengths(output, len(prompts))
    count = len(output["response_ids"]) // len(prompts)
    return [
        Group(prompt, [_trajectory(output, p * count + r, TrajectoryId(prompt.id, r), version) for r in range(count)])
        for p, prompt in enumerate(prompts)
    ]


def _or(values: list, segment: Segment, filler: float) -> list:
    return values if segment.kind == "action" else [filler] * len(segment.tokens)


def _token_rewards(trajectory: Trajectory) -> list[float]:
    rewards: list[float] = []
    for segment in trajectory.segments[1:]:
        rewards += [0.0] * len(segment.tokens)
        if segment.reward and segment.tokens:
            rewards[-1] = segment.reward
    return rewards


def _check_lengths(output: GeneratorOutput, prompts: int) -> None:
    missing = [name for name in _PARALLEL if name not in output]
    if missing:
        raise UserError(f"the generator's output lacks {', '.join(missing)}")
    lengths = {name: len(dict(output)[name]) for name in _PARALLEL}  # type: ignore[arg-type]
    if len(set(lengths.values())) != 1 or lengths["response_ids"] % prompts:
        raise UserError(f"the generator's lists must be as long as the trajectories asked for; found {lengths}")


def _trajectory(output: GeneratorOutput, row: int, identity: TrajectoryId, version: int) -> Trajectory:
    tokens = output["response_ids"][row]
    mask = output["loss_masks"][row]
    logprobs = output["rollout_logprobs"][row] if output.get("rollout_logprobs") else [math.nan] * len(tokens)
    versions = output["rollout_versions"][row] if output.get("rollout_versions") else [version] * len(tokens)
    rewards = _rewards_per_token(output["rewards"][row], mask, identity)
    per_token: tuple[Sequence[float], ...] = (mask, logprobs, versions)
    for name, values in zip(_PER_TOKEN, per_token, strict=True):
        if len(values) != len(tokens):
            raise UserError(f"{identity}: {len(values)} {name} for {len(tokens)} response tokens")
    segments = [Segment("prompt", list(output["prompt_token_ids"][row]))]
    for is_action, run in groupby(range(len(tokens)), key=lambda t: bool(mask[t])):
        span = list(run)
        cut = slice(span[0], span[-1] + 1)
        if is_action:
            earned = sum(rewards[cut])
            segments.append(Segment("action", tokens[cut], logprobs[cut], versions[cut], earned))
        else:
            segments.append(Segment("observation", tokens[cut]))
    metrics = output["trajectory_metrics"][row] if "trajectory_metrics" in output else {}
    return Trajectory(identity, segments, output["stop_reasons"][row], metrics)


def _rewards_per_token(reward: float | Sequence[float], mask: Sequence[int], identity: TrajectoryId) -> list[float]:
    """Per response token; one number for the whole trajectory goes to its last action token."""
    if isinstance(reward, int | float):
        values = [0.0] * len(mask)
        if 1 in mask:
            values[len(mask) - 1 - list(mask)[::-1].index(1)] = float(reward)
    else:
        values = [float(r) for r in reward]
    if len(values) != len(mask):
        raise UserError(f"{identity}: {len(values)} rewards for {len(mask)} response tokens")
    if not all(math.isfinite(v) for v in values):
        raise UserError(f"{identity}: the reward is not finite")
    return values
