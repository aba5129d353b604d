"""Metrics of finished trajectories, and samples for people; pure functions of groups."""

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
from skyasync.rollout.types import Group, Prompt, Segment, Trajectory, images_in

LABEL_CHARS = 2000  # of the right answer to a sample: tests of a program may be a book
MAX_SHOWN_TOKENS = 512  # of a sample, so that a run of long responses does not fill the disk
_DIGITS = 4  # of a log-probability that is shown

Decode = Callable[[list[int]], str]


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and the environments' own metrics. Lengths are in generated tokens.

    A failed episode with nothing to train (``environment.on_error=mask``) is counted, and nothing
    else.
    """
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    trajectories = [trajectory for trajectory in episodes if not trajectory.ended_early]
    environments = {f"env/{name}": value for name, value in environment_metrics(episodes).items()}
    if not trajectories:
        return environments
    rewards = [trajectory.reward for trajectory in trajectories]
    lengths = [trajectory.response_length for trajectory in trajectories]
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards) if all(map(isfinite, rewards)) else nan,
        "reward/mixed_groups": _mixed_groups(groups),
        "response/length_mean": fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": fmean(t.stop_reason == "length" for t in trajectories),
    }
    # Failed episodes end early too, and env/given_up counts them.
    stopped_count = sum(t.ended_early and not t.metrics.get("given_up") for t in episodes)
    if stopped_count:  # only with early_end
        metrics["dynamic_sampling/ended_early"] = float(stopped_count)
    return metrics | _domain_metrics(groups) | environments


def _mixed_groups(groups: Sequence[Group]) -> float:
    """The fraction of groups whose rewards are not all equal."""
    return fmean(len(set(group.rewards)) > 1 for group in groups)


def _domain_metrics(groups: Sequence[Group]) -> dict[str, float]:
    domains: dict[str, list[Group]] = {}
    for group in groups:
        domain = group.prompt.extras.get("domain")
        if domain:
            domains.setdefault(str(domain), []).append(group)
    metrics: dict[str, float] = {}
    for domain, domain_groups in sorted(domains.items()):
        rewards = [reward for group in domain_groups for reward in group.rewards]
        if rewards:
            metrics[f"reward/mean/{domain}"] = fmean(rewards)
        metrics[f"reward/mixed_groups/{domain}"] = _mixed_groups(domain_groups)
        metrics[f"reward/prompts/{domain}"] = len(domain_groups) / len(groups)
    return metrics


def eval_name(name: str) -> str:
    """The name of a rollout metric in evaluation, where the mean reward is the score."""
    if name == "reward/mean" or name.startswith("reward/mean/"):
        return f"eval/score{name.removeprefix('reward/mean')}"
    return f"eval/{name.replace('/', '_')}"


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each metric over the trajectories that report it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(metric_values) / len(metric_values) for name, metric_values in values.items()}


async def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """The number of versions between the computation of tokens and ``version``.

    ``head`` is the first token of a trajectory. Other tasks run in between.
    """
    actions = [t.actions for group in groups for t in group.trajectories if t.response_length]
    counts = Counter[int]()
    pending = list[Ints]()
    tokens = 0
    action_versions = [action.versions for turns in actions for action in turns]
    for number, versions in enumerate(action_versions, 1):
        pending.append(versions)
        tokens += len(versions)
        if tokens < TURN_TOKENS and number < len(action_versions):
            continue
        batch = joined(*pending)
        # Most batches are of one version, and sorting takes longer.
        if len(batch) and batch.min() == batch.max():
            counts[int(batch[0])] += len(batch)
        else:
            values, numbers = np.unique(batch, return_counts=True)
            counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
        pending = []
        tokens = 0
        if number < len(action_versions):
            await asyncio.sleep(0)
    total = counts.total()
    if not total:
        return {}
    staleness = {version - token_version: n for token_version, n in counts.items()}
    metrics = {
        "staleness/mean": sum(versions * n for versions, n in staleness.items()) / total,
        "staleness/min": float(min(staleness)),
        "staleness/max": float(max(staleness)),
        "staleness/head_mean": fmean(version - int(turns[0].versions[0]) for turns in actions),
        "staleness/last_token_mean": fmean(
            version - int(turns[-1].versions[-1]) for turns in actions
        ),
    }
    for versions_before, n in sorted(staleness.items()):
        metrics[f"staleness/tokens_{versions_before}"] = float(n)
    return metrics


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
    samples = []
    for group in groups[:count]:
        for trajectory in group.trajectories[:1]:
            samples.append(_sample_record(group.prompt, trajectory, decode, trained))
    return samples


def _sample_record(
    prompt: Prompt,
    trajectory: Trajectory,
    decode: Decode,
    trained: Callable[[Ints], Floats | None],
) -> dict[str, Any]:
    segments = trajectory.segments
    tokens = joined(*(segment.tokens for segment in segments))
    prompt_length = len(segments[0].tokens)
    record: dict[str, Any] = {
        "prompt_id": str(trajectory.id),
        "prompt": as_text(prompt.messages[-1]["content"]),
        "response": decode(tokens[prompt_length:].tolist()),
        "reward": trajectory.reward if isfinite(trajectory.reward) else None,  # JSON has no NaN
        "stop_reason": trajectory.stop_reason,
        "versions": np.unique(trajectory.versions).tolist(),
        "tokens": token_columns(segments, decode, trained(tokens)),
    }
    images = images_in(segments)
    if images:
        record["images"] = [thumbnail_url(image) for image in images]
    label = right_answer(prompt.extras)
    if label is not None:
        record["label"] = str(label)[:LABEL_CHARS]
    return record


def token_columns(
    segments: Sequence[Segment],
    decode: Decode,
    trained: Floats | None = None,
    *,
    max_tokens: int | None = MAX_SHOWN_TOKENS,
) -> dict[str, list[Any]]:
    """Columns with one entry per token after the prompt.

    ``text``, ``versions`` (-1 for observations), ``logprobs`` (null there) and, if the trainer has
    computed them, ``trainer_logprobs``.

    Args:
        trained: the trainer's log-probabilities of the sequence, prompt included.
        max_tokens: tokens that are shown; None shows all.
    """
    columns: dict[str, list[Any]] = {"text": [], "versions": [], "logprobs": []}
    if trained is not None:
        columns["trainer_logprobs"] = []
    start = len(segments[0].tokens) if segments else 0
    for segment in segments[1:]:
        # At zero the slices are empty, and ``start`` goes on.
        free = None if max_tokens is None else max_tokens - len(columns["text"])
        tokens = segment.tokens[:free].tolist()
        count = len(tokens)
        columns["text"] += [decode([token]) for token in tokens]
        if segment.kind == "action":
            columns["versions"] += segment.versions[:free].tolist()
            columns["logprobs"] += _rounded(segment.logprobs[:free])
            if trained is not None:
                columns["trainer_logprobs"] += _rounded(trained[start : start + count])
        else:
            columns["versions"] += [-1] * count
            columns["logprobs"] += [None] * count
            if trained is not None:
                columns["trainer_logprobs"] += [None] * count
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
        group_tokens: set[bytes] = set()
        for trajectory in group.trajectories:
            if not trajectory.actions:
                continue
            tokens = b"|".join(segment.tokens.tobytes() for segment in trajectory.all_segments)
            samples += 1
            repeated += tokens in group_tokens
            group_tokens.add(tokens)
    if samples:
        return {"response/repeated": repeated / samples}
    return {}
