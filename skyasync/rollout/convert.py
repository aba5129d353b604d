"""Between trajectories and the parallel lists in which generators of other houses speak.

Invariant: what such a generator returns is checked here, once, with the prompt named; behind this point every
trajectory is whole: a prompt to start from, as many finite log-probabilities and versions as generated tokens,
and every reward on a segment.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyasync.arrays import TURN_TOKENS, Floats, Ints, floats, ints
from skyasync.errors import UserError
from skyasync.rollout.types import GeneratorOutput, Group, Prompt, Segment, Trajectory, TrajectoryId

_PARALLEL = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons")
_OPTIONAL = ("rollout_logprobs", "rollout_versions", "trajectory_metrics")

Numbers = NDArray[Any]


def generator_output(trajectories: Sequence[Trajectory]) -> GeneratorOutput:
    """The contract's form of finished trajectories, one row per sequence."""
    owners = [t for t in trajectories for _ in t.sequences]
    prompts = [sequence[0] for t in trajectories for sequence in t.sequences]
    responses = [sequence[1:] for t in trajectories for sequence in t.sequences]
    output: GeneratorOutput = {
        "prompt_token_ids": [prompt.tokens.tolist() for prompt in prompts],
        "response_ids": [_listed(response, lambda s: s.tokens) for response in responses],
        "rewards": [_listed(response, _token_rewards) for response in responses],
        "loss_masks": [_listed(response, lambda s: _filled(s, int(s.kind == "action"))) for response in responses],
        "stop_reasons": [t.stop_reason for t in owners],
        "rollout_logprobs": [_listed(r, lambda s: s.logprobs if _acts(s) else _filled(s, 0.0)) for r in responses],
        "rollout_versions": [_listed(r, lambda s: s.versions if _acts(s) else _filled(s, -1)) for r in responses],
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
    asked = _asked(prompts, samples)
    found: dict[TrajectoryId, Trajectory] = {}
    for _ in _read(output, asked, version, found):
        pass
    return _grouped(found, asked, prompts, samples)


async def groups_in_turns(
    output: GeneratorOutput, prompts: Sequence[Prompt], version: int, samples: int
) -> list[Group]:
    """``groups_from_output`` that lets other tasks run in between."""
    asked = _asked(prompts, samples)
    found: dict[TrajectoryId, Trajectory] = {}
    done = 0
    for tokens in _read(output, asked, version, found):
        done += tokens
        if done >= TURN_TOKENS:
            done = 0
            await asyncio.sleep(0)
    return _grouped(found, asked, prompts, samples)


def _asked(prompts: Sequence[Prompt], samples: int) -> list[TrajectoryId]:
    return [TrajectoryId(prompt.id, repetition) for prompt in prompts for repetition in range(samples)]


def _read(
    output: GeneratorOutput, asked: list[TrajectoryId], version: int, into: dict[TrajectoryId, Trajectory]
) -> Iterator[int]:
    """Add the rows to their trajectories; yields the tokens of each when that is done."""
    rows = _rows(output, asked)
    _check_lengths(output, len(rows))
    for row, identity in enumerate(rows):
        trajectory = _trajectory(output, row, identity, version)
        if identity in into:
            trajectory.branches = into[identity].sequences
        into[identity] = trajectory
        yield sum(len(segment.tokens) for segment in trajectory.segments)


def _grouped(
    found: dict[TrajectoryId, Trajectory], asked: list[TrajectoryId], prompts: Sequence[Prompt], samples: int
) -> list[Group]:
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


def _check_lengths(output: GeneratorOutput, asked: int) -> None:
    given: dict[str, Any] = dict(output)
    missing = [name for name in _PARALLEL if given.get(name) is None]
    if missing:
        raise UserError(f"the generator's output lacks {', '.join(missing)}")
    lengths = {name: len(given[name]) for name in (*_PARALLEL, *_OPTIONAL) if given.get(name) is not None}
    if set(lengths.values()) != {asked}:
        raise UserError(f"the generator was asked for {asked} trajectories; its lists have {lengths}")


def _trajectory(output: GeneratorOutput, row: int, identity: TrajectoryId, version: int) -> Trajectory:
    prompt = _whole_numbers("prompt_token_ids", output["prompt_token_ids"][row], identity)
    if not len(prompt):
        raise UserError(f"{identity}: the prompt has no tokens")
    tokens = _whole_numbers("response_ids", output["response_ids"][row], identity)
    mask = _per_token("loss_masks", output["loss_masks"][row], tokens, identity) != 0
    logprobs = _logprobs(output, row, mask, tokens, identity)
    versions = _versions(output, row, version, tokens, identity)
    rewards = _rewards_per_token(output["rewards"][row], mask, tokens, identity)
    segments = [Segment("prompt", prompt)]
    for start, end in _runs(mask):
        cut = slice(start, end)
        earned = rewards[cut]
        reward = sum(earned[earned != 0].tolist(), 0.0)
        if mask[start]:
            segments.append(Segment("action", tokens[cut], logprobs[cut], versions[cut], reward))
        else:
            segments.append(Segment("observation", tokens[cut], reward=reward))
    metrics = (output.get("trajectory_metrics") or {row: {}})[row]
    return Trajectory(identity, segments, output["stop_reasons"][row], metrics)


def _runs(mask: Numbers) -> Iterator[tuple[int, int]]:
    """Where the mask stays the same: [start, end)."""
    changes = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    edges = [0, *changes, len(mask)] if len(mask) else []
    return pairwise(edges)


def _numbers(name: str, values: object, identity: TrajectoryId) -> Numbers:
    try:
        found = np.asarray(values)
        if not found.size:
            return found.astype(np.int64).reshape(-1)
        if found.ndim == 1 and found.dtype.kind in "biuf":
            return found
        problem = f"found {values!r:.60}"
    except (TypeError, ValueError, RuntimeError) as error:  # of values with lengths or devices of their own
        problem = str(error)
    raise UserError(f"{identity}: {name} must be numbers, one per token: {problem}")


def _whole_numbers(name: str, values: object, identity: TrajectoryId) -> Ints:
    found = _numbers(name, values, identity)
    if found.dtype.kind == "f" and not (np.isfinite(found) & (found == np.floor(found))).all():
        raise UserError(f"{identity}: {name} must be whole numbers")
    return ints(found)


def _per_token(name: str, values: object, tokens: Ints, identity: TrajectoryId) -> Numbers:
    return _as_many(name, _numbers(name, values, identity), tokens, identity)


def _as_many(name: str, found: Numbers, tokens: Ints, identity: TrajectoryId) -> Numbers:
    if len(found) != len(tokens):
        raise UserError(f"{identity}: {len(found)} {name} for {len(tokens)} response tokens")
    return found


def _logprobs(output: GeneratorOutput, row: int, mask: Numbers, tokens: Ints, identity: TrajectoryId) -> Floats:
    if not output.get("rollout_logprobs"):
        return floats(np.full(len(tokens), math.nan))
    logprobs = floats(_per_token("rollout_logprobs", output["rollout_logprobs"][row], tokens, identity))
    if not np.isfinite(logprobs[mask]).all():
        raise UserError(f"{identity}: rollout_logprobs of generated tokens must be finite")
    return logprobs


def _versions(output: GeneratorOutput, row: int, version: int, tokens: Ints, identity: TrajectoryId) -> Ints:
    if not output.get("rollout_versions"):
        return ints(np.full(len(tokens), version))
    versions = _whole_numbers("rollout_versions", output["rollout_versions"][row], identity)
    return _as_many("rollout_versions", versions, tokens, identity)


def _rewards_per_token(reward: object, mask: Numbers, tokens: Ints, identity: TrajectoryId) -> Numbers:
    """Per response token; one number for the whole trajectory goes to its last action token, or else its last."""
    if isinstance(reward, Real):
        values = np.zeros(len(tokens))
        if len(tokens):
            values[int(np.flatnonzero(mask)[-1]) if mask.any() else -1] = float(reward)
    else:
        values = _per_token("rewards", reward, tokens, identity).astype(np.float64)
    return values


def _listed(response: list[Segment], of: Callable[[Segment], Numbers]) -> list[Any]:
    return [value for segment in response for value in of(segment).tolist()]


def _acts(segment: Segment) -> bool:
    return segment.kind == "action"


def _filled(segment: Segment, value: float) -> Numbers:
    return np.full(len(segment.tokens), value)


def _token_rewards(segment: Segment) -> Numbers:
    rewards = np.zeros(len(segment.tokens))
    rewards[-1:] = segment.reward
    return rewards
