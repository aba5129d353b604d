"""Numbers about finished trajectories, and samples for people; pure functions of groups."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from math import isfinite, nan
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from skyasync.arrays import TURN_TOKENS, Floats, Ints, joined
from skyasync.envs.images import as_text
from skyasync.envs.reward import right_answer
from skyasync.models.images import thumbnail_url
from skyasync.rollout.types import Group, Segment, Trajectory, images_in

LABEL_CHARS = 2000  # of the right answer to a sample: tests of a program may be a book
MOST_TOKENS = 512  # of a sample, so that a run of long responses does not fill the disk
_DIGITS = 4

Decode = Callable[[list[int]], str]


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and the environments' own metrics. Lengths are in generated tokens.

    A failed episode with nothing to train (``environment.on_error=mask``) is counted, and nothing
    else.
    """
    everything = [t for group in groups for t in group.trajectories]
    trajectories = [t for t in everything if not t.ended_early]
    environments = {f"env/{name}": value for name, value in environment_metrics(everything).items()}
    if not trajectories:
        return environments
    ended = sum(t.ended_early and not t.metrics.get("given_up") for t in everything)
    rewards = [t.reward for t in trajectories]
    lengths = [t.response_length for t in trajectories]
    domains: dict[str, list[Group]] = {}
    for group in groups:
        domain = group.prompt.extras.get("domain")
        if domain:
            domains.setdefault(str(domain), []).append(group)
    by_domain: dict[str, float] = {}
    for domain, own in sorted(domains.items()):
        earned = [reward for group in own for reward in group.rewards]
        if earned:
            by_domain[f"reward/mean/{domain}"] = fmean(earned)
        by_domain[f"reward/mixed_groups/{domain}"] = fmean(
            len(set(group.rewards)) > 1 for group in own
        )
        by_domain[f"reward/prompts/{domain}"] = len(own) / len(groups)
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards) if all(map(isfinite, rewards)) else nan,
        "reward/mixed_groups": fmean(len(set(g.rewards)) > 1 for g in groups),
        "response/length_mean": fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": fmean(t.stop_reason == "length" for t in trajectories),
        **({"dynamic_sampling/ended_early": float(ended)} if ended else {}),
        **by_domain,
        **environments,
    }


def eval_name(name: str) -> str:
    """The name of a rollout metric in evaluation: the reward is the score, over all prompts and per
    domain."""
    score, mean, domain = name.partition("reward/mean")
    if mean and not score and (not domain or domain.startswith("/")):
        return f"eval/score{domain}"
    return f"eval/{name.replace('/', '_')}"


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each metric over the trajectories that report it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(reported) / len(reported) for name, reported in values.items()}


async def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions before ``version`` the tokens were computed, each by its own policy
    version.

    ``head`` is the first token of a trajectory, ``tail`` the last. Other tasks run in between.
    """
    actions = [t.actions for group in groups for t in group.trajectories if t.response_length]
    counts = Counter[int]()
    pending = list[Ints]()
    tokens = 0
    every = [action.versions for of_one in actions for action in of_one]
    for number, versions in enumerate(every, 1):
        pending.append(versions)
        tokens += len(versions)
        if tokens < TURN_TOKENS and number < len(every):
            continue
        some = joined(*pending)
        if (
            len(some) and some.min() == some.max()
        ):  # most are of one version, and sorting takes longer
            counts[int(some[0])] += len(some)
        else:
            values, numbers = np.unique(some, return_counts=True)
            counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
        pending = []
        tokens = 0
        if number < len(every):
            await asyncio.sleep(0)
    total = sum(counts.values())
    if not total:
        return {}
    staleness = {version - computed: n for computed, n in counts.items()}
    return {
        "staleness/mean": sum(versions * n for versions, n in staleness.items()) / total,
        "staleness/min": float(min(staleness)),
        "staleness/max": float(max(staleness)),
        "staleness/head_mean": fmean(version - int(of_one[0].versions[0]) for of_one in actions),
        "staleness/last_token_mean": fmean(
            version - int(of_one[-1].versions[-1]) for of_one in actions
        ),
        **{f"staleness/tokens_{versions}": float(n) for versions, n in sorted(staleness.items())},
    }


# ---------------------------------------------------------------- samples


def sample_records(
    groups: Sequence[Group],
    count: int,
    decode: Decode,
    trained: Callable[[Ints], Floats | None] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """The first samples of the first groups.

    Args:
        trained: the trainer's log-probabilities of a sequence, if the trainer has computed them.
    """
    return [
        {
            "prompt_id": str(trajectory.id),
            "prompt": as_text(group.prompt.messages[-1]["content"]),
            "response": decode(joined(*(s.tokens for s in trajectory.segments[1:])).tolist()),
            "reward": trajectory.reward if isfinite(trajectory.reward) else None,
            "stop_reason": trajectory.stop_reason,
            "versions": np.unique(trajectory.versions).tolist(),
            "tokens": token_columns(
                trajectory.segments,
                decode,
                trained(joined(*(s.tokens for s in trajectory.segments))),
            ),
        }
        | (
            {"images": [thumbnail_url(image) for image in images]}
            if (images := images_in(trajectory.segments))
            else {}
        )
        | (
            {}
            if (label := right_answer(group.prompt.extras)) is None
            else {"label": str(label)[:LABEL_CHARS]}
        )
        for group in groups[:count]
        for trajectory in group.trajectories[:1]
    ]


def token_columns(
    segments: Sequence[Segment],
    decode: Decode,
    trained: Floats | None = None,
    *,
    most: int | None = MOST_TOKENS,
) -> dict[str, list[Any]]:
    """One entry per token after the prompt: ``text``, ``versions`` (-1 for observations),
    ``logprobs`` (null there) and, if the trainer has computed them, ``trainer_logprobs``.

    Args:
        trained: the trainer's log-probabilities of the whole sequence.
        most: tokens that are shown; None shows all.
    """
    columns: dict[str, list[Any]] = {"text": [], "versions": [], "logprobs": []}
    if trained is not None:
        columns["trainer_logprobs"] = []
    start = len(segments[0].tokens) if segments else 0
    for segment in segments[1:]:
        free = None if most is None else most - len(columns["text"])
        tokens = segment.tokens[:free].tolist()
        nothing = [None] * len(tokens)
        action = segment.kind == "action"
        columns["text"] += [decode([token]) for token in tokens]
        columns["versions"] += segment.versions[:free].tolist() if action else [-1] * len(tokens)
        columns["logprobs"] += _rounded(segment.logprobs[:free]) if action else nothing
        if trained is not None:
            columns["trainer_logprobs"] += (
                _rounded(trained[start : start + len(tokens)]) if action else nothing
            )
        start += len(segment.tokens)
    return columns


def _rounded(values: Floats) -> list[float | None]:
    return [round(value, _DIGITS) if isfinite(value) else None for value in values.tolist()]


# ---------------------------------------------------------------- repeated samples


def repeated_samples(groups: Sequence[Group]) -> dict[str, float]:
    """The fraction of samples that are equal to an earlier one of their group, token for token.

    A sample is all that was read and written, with the borders of its segments. Samples without a
    response do not count.
    """
    samples = 0
    repeated = 0
    for group in groups:
        seen: set[bytes] = set()
        for trajectory in group.trajectories:
            if not trajectory.actions:
                continue
            segments = [segment for sequence in trajectory.sequences for segment in sequence]
            tokens = b"|".join(segment.tokens.tobytes() for segment in segments)
            samples += 1
            repeated += tokens in seen
            seen.add(tokens)
    if samples:
        return {"response/repeated": repeated / samples}
    return {}
