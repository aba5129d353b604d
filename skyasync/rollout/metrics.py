"""Numbers about finished trajectories; pure functions of groups."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import isfinite, nan
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from skyasync.arrays import TURN_TOKENS, Floats, Ints, joined
from skyasync.envs.reward import right_answer
from skyasync.rollout.shown import token_columns
from skyasync.rollout.types import Group, Trajectory

LABEL_CHARS = 2000  # of a right answer beside a sample: tests of a program may be a book


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and the environments' own metrics. Lengths are in generated tokens.

    Of an episode that was given up with nothing to train (``environment.on_error=mask``) only that is counted.
    """
    everything = _all(groups)
    trajectories = [t for t in everything if not t.ended_early]
    environments = {f"env/{name}": value for name, value in environment_metrics(everything).items()}
    if not trajectories:
        return environments
    ended = sum(t.ended_early and not t.metrics.get("given_up") for t in everything)
    rewards = [t.reward for t in trajectories]
    lengths = [t.response_length for t in trajectories]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards) if all(map(isfinite, rewards)) else nan,
        "reward/mixed_groups": fmean(len(set(g.rewards)) > 1 for g in groups),
        "response/length_mean": fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": fmean(t.stop_reason == "length" for t in trajectories),
        **({"dynamic_sampling/ended_early": float(ended)} if ended else {}),
        **domain_metrics(groups),
        **environments,
    }


def domain_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Per domain: the mean reward, the share of groups with different rewards, and the share of all prompts."""
    domains: dict[str, list[Group]] = {}
    for group in groups:
        if domain := group.prompt.extras.get("domain"):
            domains.setdefault(str(domain), []).append(group)
    metrics: dict[str, float] = {}
    for domain, own in sorted(domains.items()):
        metrics[f"reward/mean/{domain}"] = fmean(r for group in own for r in group.rewards)
        metrics[f"reward/mixed_groups/{domain}"] = fmean(len(set(group.rewards)) > 1 for group in own)
        metrics[f"reward/prompts/{domain}"] = len(own) / len(groups)
    return metrics


def eval_name(name: str) -> str:
    """What a rollout's metric is called in evaluation: the reward is the score, over all and per domain."""
    score, mean, domain = name.partition("reward/mean")
    if mean and not score and (not domain or domain.startswith("/")):
        return f"eval/score{domain}"
    return f"eval/{name.replace('/', '_')}"


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each metric over the trajectories that report it."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            sums[name] += value  # type: ignore[assignment]
            counts[name] += 1
    return {name: sums[name] / counts[name] for name in sums}


async def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions before ``version`` the tokens were computed, by the tokens' own stamps.

    ``head`` is the first token of a trajectory, ``tail`` the last. Other tasks have their turn in between.
    """
    counts = Counter[int]()
    for _ in _count_versions(groups, counts):
        await asyncio.sleep(0)
    return _staleness(groups, version, counts)


def _count_versions(groups: Sequence[Group], into: Counter[int]) -> Iterator[None]:
    """Tokens per version; pauses now and then."""
    stamps: list[Ints] = []
    tokens = 0
    for found in (action.versions for t in _all(groups) for action in t.actions):
        stamps.append(found)
        tokens += len(found)
        if tokens >= TURN_TOKENS:
            _count(joined(*stamps), into)
            stamps, tokens = [], 0
            yield
    _count(joined(*stamps), into)


def _count(stamps: Ints, into: Counter[int]) -> None:
    if len(stamps) and stamps.min() == stamps.max():  # most are of one version, and sorting takes longer
        into[int(stamps[0])] += len(stamps)
    else:
        into.update(dict(zip(*(found.tolist() for found in np.unique(stamps, return_counts=True)), strict=True)))


def _staleness(groups: Sequence[Group], version: int, tokens_of: Counter[int]) -> dict[str, float]:
    actions = [t.actions for t in _all(groups) if t.response_length]
    ages = {version - stamp: count for stamp, count in tokens_of.items()}
    tokens = sum(ages.values())
    if not tokens:
        return {}
    return {
        "staleness/mean": sum(age * n for age, n in ages.items()) / tokens,
        "staleness/min": float(min(ages)),
        "staleness/max": float(max(ages)),
        "staleness/head_mean": fmean(version - int(of_one[0].versions[0]) for of_one in actions),
        "staleness/tail_mean": fmean(version - int(of_one[-1].versions[-1]) for of_one in actions),
        **{f"staleness/tokens_{age}": float(n) for age, n in sorted(ages.items())},
    }


def sample_records(
    groups: Sequence[Group],
    count: int,
    decode: Callable[..., str],
    trained: Callable[[Ints], Floats | None] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """The first samples of the first groups, readable by a person.

    Args:
        trained: the trainer's log-probabilities of a sequence, where it has looked at it.
    """
    return [
        {
            "prompt_id": str(trajectory.id),
            "prompt": group.prompt.messages[-1]["content"],
            "response": decode(joined(*(s.tokens for s in trajectory.segments[1:])).tolist()),
            "reward": trajectory.reward if isfinite(trajectory.reward) else None,
            "stop_reason": trajectory.stop_reason,
            "versions": np.unique(trajectory.versions).tolist(),
            "tokens": token_columns(
                trajectory.segments, decode, trained(joined(*(s.tokens for s in trajectory.segments)))
            ),
        }
        | ({} if (label := right_answer(group.prompt.extras)) is None else {"label": str(label)[:LABEL_CHARS]})
        for group in groups[:count]
        for trajectory in group.trajectories[:1]
    ]


def _all(groups: Sequence[Group]) -> list[Trajectory]:
    return [t for group in groups for t in group.trajectories]
