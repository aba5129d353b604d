"""Between trajectories and the generator contract's parallel lists.

Invariant: what a generator returns is checked here, once, with the prompt named; behind this point every
trajectory is whole: a prompt to start from, as many log-probabilities and versions as generated tokens, finite
numbers, and every reward on a segment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from numbers import Real
from typing import Any

from skyasync.errors import UserError
from skyasync.rollout.types import GeneratorOutput, Group, Prompt, Segment, Trajectory, TrajectoryId

_PARALLEL = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons")
_NUMBERS = {int, float, bool}
_OPTIONAL = ("rollout_logprobs", "rollout_versions", "trajectory_metrics")


def generator_output(trajectories: Sequence[Trajectory]) -> GeneratorOutput:
    """The contract's form of finished trajectories, one row per sequence."""
    owners = [t for t in trajectories for _ in t.sequences]
    prompts = [sequence[0] for t in trajectories for sequence in t.sequences]
    responses = [sequence[1:] for t in trajectories for sequence in t.sequences]
    output: GeneratorOutput = {
        "prompt_token_ids": [prompt.tokens for prompt in prompts],
        "response_ids": [[token for s in response for token in s.tokens] for response in responses],
        "rewards": [_token_rewards(response) for response in responses],
        "loss_masks": [[int(s.kind == "action") for s in response for _ in s.tokens] for response in responses],
        "stop_reasons": [t.stop_reason for t in owners],
        "rollout_logprobs": [[p for s in response for p in _or(s.logprobs, s, 0.0)] for response in responses],
        "rollout_versions": [[v for s in response for v in _or(s.versions, s, -1)] for response in responses],
        "trajectory_metrics": [t.metrics for t in owners],
    }
    if len(owners) > len(trajectories):
        output["trajectory_ids"] = [t.id for t in owners]
    return output


def groups_from_output(output: GeneratorOutput, prompts: Sequence[Prompt], version: int, samples: int) -> list[Group]:
    """One group per prompt, of ``samples`` trajectories, in the order asked.

    Without ``rollout_logprobs`` the actions' log-probabilities are NaN. A reward on tokens that ``loss_masks``
    leaves out stays there: it counts for the group, though no token learns from it.

    Args:
        version: taken for all tokens where the generator gives no ``rollout_versions``.

    Raises:
        UserError: naming the list or the trajectory that is wrong.
    """
    asked = [TrajectoryId(prompt.id, repetition) for prompt in prompts for repetition in range(samples)]
    rows = _rows(output, asked)
    _check_lengths(output, len(rows))
    found: dict[TrajectoryId, Trajectory] = {}
    for row, identity in enumerate(rows):
        trajectory = _trajectory(output, row, identity, version)
        if identity in found:
            trajectory.branches = found[identity].sequences
        found[identity] = trajectory
    trajectories = [found[identity] for identity in asked]
    return [Group(prompt, trajectories[p * samples : (p + 1) * samples]) for p, prompt in enumerate(prompts)]


def _rows(output: GeneratorOutput, asked: list[TrajectoryId]) -> list[TrajectoryId]:
    """Which trajectory each row belongs to."""
    rows = output.get("trajectory_ids")
    if rows is None:
        return asked
    if set(rows) != set(asked):
        missing, foreign = set(asked) - set(rows), set(rows) - set(asked)
        problem = f"lack {min(missing)}" if missing else f"have {min(foreign)}, which was not asked for"
        raise UserError(f"the generator's trajectory_ids {problem}")
    return rows


def _or(values: list, segment: Segment, filler: float) -> list:
    return values if segment.kind == "action" else [filler] * len(segment.tokens)


def _token_rewards(response: list[Segment]) -> list[float]:
    rewards: list[float] = []
    for segment in response:
        rewards += [0.0] * len(segment.tokens)
        if segment.reward and segment.tokens:
            rewards[-1] = segment.reward
    return rewards


def _check_lengths(output: GeneratorOutput, asked: int) -> None:
    given: dict[str, Any] = dict(output)
    missing = [name for name in _PARALLEL if given.get(name) is None]
    if missing:
        raise UserError(f"the generator's output lacks {', '.join(missing)}")
    lengths = {name: len(given[name]) for name in (*_PARALLEL, *_OPTIONAL) if given.get(name) is not None}
    if set(lengths.values()) != {asked}:
        raise UserError(f"the generator was asked for {asked} trajectories; its lists have {lengths}")


def _trajectory(output: GeneratorOutput, row: int, identity: TrajectoryId, version: int) -> Trajectory:
    prompt, tokens = list(output["prompt_token_ids"][row]), list(output["response_ids"][row])
    if not prompt:
        raise UserError(f"{identity}: the prompt has no tokens")
    mask = _per_token("loss_masks", output["loss_masks"][row], tokens, identity)
    logprobs = _logprobs(output, row, mask, tokens, identity)
    versions = _versions(output, row, version, tokens, identity)
    rewards = _rewards_per_token(output["rewards"][row], mask, tokens, identity)
    segments = [Segment("prompt", prompt)]
    for is_action, run in groupby(range(len(tokens)), key=lambda t: bool(mask[t])):
        span = list(run)
        cut = slice(span[0], span[-1] + 1)
        if is_action:
            segments.append(Segment("action", tokens[cut], logprobs[cut], versions[cut], sum(rewards[cut])))
        else:
            segments.append(Segment("observation", tokens[cut], reward=sum(rewards[cut])))
    metrics = (output.get("trajectory_metrics") or {row: {}})[row]
    return Trajectory(identity, segments, output["stop_reasons"][row], metrics)


def _per_token(name: str, values: Any, tokens: list[int], identity: TrajectoryId) -> list[Any]:
    """The values as a list of numbers, one per response token."""
    try:
        numbers = list(values)
        if not _NUMBERS.issuperset(map(type, numbers)):  # arrays, or no numbers at all
            numbers = [float(v + 0.0) for v in numbers]  # text has a float() too, but no sum
    except (TypeError, ValueError) as error:
        raise UserError(f"{identity}: {name} must be numbers, one per response token: {error}") from error
    if len(numbers) != len(tokens):
        raise UserError(f"{identity}: {len(numbers)} {name} for {len(tokens)} response tokens")
    return numbers


def _logprobs(output: GeneratorOutput, row: int, mask: list[Any], tokens: list[int],
              identity: TrajectoryId) -> list[float]:  # fmt: skip
    if not output.get("rollout_logprobs"):
        return [math.nan] * len(tokens)
    logprobs = _per_token("rollout_logprobs", output["rollout_logprobs"][row], tokens, identity)
    if not all(math.isfinite(p) for p, is_action in zip(logprobs, mask, strict=True) if is_action):
        raise UserError(f"{identity}: rollout_logprobs of generated tokens must be finite")
    return logprobs


def _versions(output: GeneratorOutput, row: int, version: int, tokens: list[int], identity: TrajectoryId) -> list[int]:
    if not output.get("rollout_versions"):
        return [version] * len(tokens)
    versions = _per_token("rollout_versions", output["rollout_versions"][row], tokens, identity)
    if {int}.issuperset(map(type, versions)):
        return versions
    if not all(float(v).is_integer() for v in versions):
        raise UserError(f"{identity}: rollout_versions must be whole numbers")
    return [int(v) for v in versions]


def _rewards_per_token(reward: Any, mask: list[Any], tokens: list[int], identity: TrajectoryId) -> list[float]:
    """Per response token; one number for the whole trajectory goes to its last action token, or else its last."""
    if isinstance(reward, Real):
        values = [0.0] * len(tokens)
        if tokens:
            values[max((t for t, is_action in enumerate(mask) if is_action), default=-1)] = float(reward)
        finite = math.isfinite(reward)
    else:
        values = [float(r) for r in _per_token("rewards", reward, tokens, identity)]
        finite = all(math.isfinite(r) for r in values)
    if not finite:
        raise UserError(f"{identity}: the reward is not finite")
    return values
