"""The charts of a report: their metrics, what these say together, and what an empty one needs.

Invariant: data only. A metric that a run does not log has no line; a chart without lines is a
sentence about what would fill it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyasync.observability.jsonl import values_of

Row = Mapping[str, Any]
MOST_OWN = 6  # charts of environments' own metrics, and lines in one of them
#: The disjoint phases of time/train_s.
TRAINING = (
    "time/update_s",
    "time/logprobs_s",
    "time/reference_s",
    "time/teacher_s",
    "time/values_s",
)
_RATIO = re.compile(r"off_policy/staleness_(\d+)/ratio_mean")
_TOKENS = re.compile(r"staleness/tokens_(-?\d+)")
_WAIT = re.compile(r"time/wait_\w+_s")
NEGLIGIBLE = 0.005  # share of a step that is not shown: rounding of its phases


@dataclass(frozen=True)
class Line:
    """One metric over the steps. ``low`` and ``high`` are metrics that make a band around it."""

    metric: str
    label: str
    markers: bool = False  # points that are joined: measured now and then
    smooth: bool = False  # over its raw values
    low: str = ""
    high: str = ""


@dataclass(frozen=True)
class Chart:
    """One picture. ``missing`` says what would fill it."""

    title: str
    lines: tuple[Line, ...]
    says: str = ""
    missing: str = "No step has been logged yet."
    log: bool = False
    percent: bool = False
    kind: str = "lines"  # or histogram, stack
    large: bool = False


@dataclass(frozen=True)
class Section:
    """Charts under one heading; ``name`` is its anchor in the page."""

    name: str
    title: str
    charts: tuple[Chart, ...]


_REWARD = Chart(
    "Reward and score",
    (
        Line("reward/mean", "training reward", smooth=True),
        Line("eval/score", "held-out score", markers=True),
    ),
    says="The mean reward of the trained samples, and the score of the held-out prompts.",
    large=True,
)
_SUPERVISED = Chart(
    "Loss of given responses",
    (Line("sft/loss", "training loss"), Line("eval/loss", "held-out loss", markers=True)),
    says="Cross-entropy per response token, in nats (skyasync sft).",
    large=True,
)
_SIGNAL = Chart(
    "Informative groups",
    (Line("reward/mixed_groups", "groups with different rewards", smooth=True),),
    says="If all samples of a prompt have the same reward, their group-relative advantages are 0.",
    percent=True,
)
_KL = Chart(
    "KL divergence",
    (
        Line("policy/approx_kl", "of the update (anchor to current)"),
        Line("off_policy/kl", "engine to trainer (k3)"),
        Line("policy/kl_loss", "to the reference, in the loss"),
        Line("reward/kl", "to the reference, in the reward"),
    ),
    says="How far an update moves the policy, and how far the trained policy is from the sampling one.",
    missing="No update has been logged yet. trainer.algorithm.use_kl_loss=true adds the divergence from the reference.",
)
_CLIPPED = Chart(
    "Clipped and masked tokens",
    (
        Line("policy/clip_fraction", "clipped by the loss"),
        Line("policy/correction_masked", "masked by the correction"),
        Line("off_policy/clipped_fraction", "weight truncated by the correction"),
    ),
    says="Shares of the trained tokens.",
    missing="No update has been logged yet, or the loss neither clips nor corrects.",
    percent=True,
)
_ENTROPY = Chart(
    "Entropy",
    (Line("policy/entropy", "of the policy, per token"),),
    missing="Set trainer.algorithm.use_entropy_loss=true (trainer.algorithm.entropy_loss_coef=0 only measures).",
)
_GRADIENT = Chart(
    "Gradient norm",
    (Line("policy/grad_norm", "before clipping"),),
    missing="No update was logged yet.",
)
_RATE = Chart(
    "Learning rate", (Line("policy/lr", "learning rate"),), missing="No update has been logged yet."
)
_CRITIC = Chart(
    "Critic",
    (Line("critic/explained_variance", "explained variance of the returns"),),
    says="1 if the values predict the returns exactly, 0 if they predict no better than the mean return.",
    missing="Needs a critic: trainer.algorithm.advantage_estimator=gae.",
)
_STALENESS = Chart(
    "Staleness",
    (Line("staleness/mean", "mean over tokens", low="staleness/min", high="staleness/max"),),
    says="Policy versions between sampling and training of a token; the band is from the smallest to the largest.",
)
_HISTOGRAM = Chart(
    "Tokens by staleness",
    (),
    says="Of the whole run.",
    missing="Needs the metrics staleness/tokens_<n>.",
    kind="histogram",
)
_ESS = Chart(
    "Effective sample size",
    (Line("off_policy/effective_sample_size", "share of the tokens"),),
    says="1 if all tokens have the same importance weight; near 0 if a few tokens dominate the gradient.",
    missing="Needs the engine's log-probabilities: a generator that returns rollout_logprobs.",
    percent=True,
)
_CONTROL = Chart(
    "Step size under staleness",
    (
        Line("staleness_control/lr_scale", "factor of the learning rate"),
        Line("staleness_control/adam_beta1", "AdamW's first decay rate"),
        Line("staleness_control/correction_exponent", "exponent of the correction's factors"),
    ),
    says="All are lower under staleness: without, factor and exponent are 1, and the decay rate is the settings'.",
    percent=True,
)
_BOUND = Chart(
    "Staleness bound",
    (Line("staleness_control/max_staleness", "of prompts submitted now"),),
    says="trainer.max_staleness, and less while staleness leaves a small effective sample size for many steps.",
)
_GAP = Chart(
    "Trainer and engine",
    (
        Line("sync/logprob_gap_mean", "mean difference of log-probabilities", markers=True),
        Line("sync/logprob_gap_limit", "limit of the mean"),
        Line("sync/logprob_gap", "largest difference", markers=True),
    ),
    says="On verification prompts, with the same weights on both sides: only rounding should remain.",
    missing="Needs generator.verify_weight_sync=true; measured every generator.verify_interval syncs.",
    log=True,
)
_LENGTHS = Chart(
    "Response length",
    (Line("response/length_mean", "mean"), Line("response/length_max", "longest")),
    says="In generated tokens.",
)
_TRUNCATED = Chart(
    "Truncated responses",
    (
        Line("response/truncated", "in training"),
        Line("eval/response_truncated", "in evaluation", markers=True),
    ),
    says="Cut by generator.sampling_params.max_generate_length or generator.max_model_len.",
    percent=True,
)
_THROUGHPUT = Chart(
    "Throughput", (Line("throughput/tokens_per_s", "generated tokens/s", smooth=True),)
)
_IDLE = Chart(
    "Idle shares",
    (Line("idle/trainer", "trainer", smooth=True), Line("idle/engines", "engines", smooth=True)),
    says="Shares of the time since the end of the step before, evaluations and checkpoints included.",
    percent=True,
)
_STEP = Chart("Seconds per step", (Line("time/step_s", "seconds", smooth=True),))


def sections(rows: Sequence[Row], *, several: bool = False) -> list[Section]:
    """The sections of a report on these rows.

    Args:
        several: the rows are of several runs, whose charts have fewer lines.
    """
    names = {name for row in rows for name, value in row.items() if value is not None}
    control = []
    if "staleness_control/lr_scale" in names:
        control.append(_CONTROL)
    if "staleness_control/max_staleness" in names:
        control.append(_BOUND)
    goal = _SUPERVISED if "sft/loss" in names else _REWARD
    rewards = Chart(
        "Reward by domain",
        _lines_below("reward/mean/", names, smooth=True),
        missing="Needs rows with a domain (data.domain_key).",
    )
    scores = Chart(
        "Score by domain",
        _lines_below("eval/score/", names, markers=True),
        missing="Needs held-out rows with a domain (data.domain_key).",
    )
    return [
        Section("reward", "Reward and evaluation", (goal, rewards, scores)),
        Section(
            "policy", "The policy's updates", (_KL, _CLIPPED, _ENTROPY, _GRADIENT, _RATE, _CRITIC)
        ),
        Section(
            "staleness",
            "Staleness and correction",
            (_STALENESS, _HISTOGRAM, _log_ratios(names), _ESS, *control, _GAP),
        ),
        Section(
            "responses",
            "Responses and groups",
            (_LENGTHS, _TRUNCATED, _SIGNAL, *_environments(rows, names)),
        ),
        Section(
            "speed", "Speed", (_THROUGHPUT, _IDLE, _STEP if several else _step_components(rows))
        ),
    ]


def _lines_below(
    prefix: str, names: Iterable[str], *, smooth: bool = False, markers: bool = False
) -> tuple[Line, ...]:
    """A line for each metric that begins with the prefix, labelled with the rest of its name."""
    lines = []
    for name in sorted(names):
        if name.startswith(prefix):
            label = name.removeprefix(prefix)
            lines.append(Line(name, label, smooth=smooth, markers=markers))
    return tuple(lines)


def _log_ratios(names: Iterable[str]) -> Chart:
    versions = []
    for name in names:
        match = _RATIO.fullmatch(name)
        if match:
            versions.append(int(match[1]))
    lines = []
    for count in sorted(versions):
        label = f"{count} version old" if count == 1 else f"{count} versions old"
        lines.append(Line(f"off_policy/staleness_{count}/abs_log_ratio", label))
    return Chart(
        "Log-ratio by staleness",
        tuple(lines),
        says="Mean |log(trainer / engine)| of the tokens of each staleness, before the correction.",
        missing="Needs the engine's log-probabilities: a generator that returns rollout_logprobs.",
    )


def _environments(rows: Sequence[Row], names: Iterable[str]) -> list[Chart]:
    """Charts of environments' own metrics: shares have one scale and are drawn together."""
    shares: list[Line] = []
    amounts: list[Line] = []
    for line in _lines_below("env/", names):
        if all(0 <= value <= 1 for value in values_of(rows, line.metric)):
            shares.append(line)
        else:
            amounts.append(line)
    groups = [shares[start : start + MOST_OWN] for start in range(0, len(shares), MOST_OWN)]
    groups += [[line] for line in amounts]
    charts = []
    for group in groups[:MOST_OWN]:
        title = "Environments' own metrics"
        if len(group) == 1:
            title += f": {group[0].label}"
        charts.append(Chart(title, tuple(group)))
    return charts


def _step_components(rows: Sequence[Row]) -> Chart:
    names: dict[str, None] = {}  # a set in the order in which components first appear
    for row in rows:
        names |= dict.fromkeys(step_parts(row))
    return Chart(
        "Seconds per step",
        tuple(Line(name, name) for name in names),
        says="What the trainer does or waits for; the parts add up to the step.",
        kind="stack",
    )


def tokens_by_staleness(rows: Sequence[Row]) -> dict[int, float]:
    """Trained tokens of all rows by their staleness in versions, which ascends."""
    totals: dict[int, float] = {}
    for row in rows:
        for name, value in row.items():
            match = _TOKENS.fullmatch(name)
            if match and value is not None:
                staleness = int(match[1])
                totals[staleness] = totals.get(staleness, 0.0) + float(value)
    return dict(sorted(totals.items()))


def step_parts(row: Row) -> dict[str, float]:
    """Seconds of a step by what its trainer did or waited for.

    Components are disjoint and add up to ``time/step_s``; none for a row that is no step.
    """
    step_s = row.get("time/step_s")
    if step_s is None:
        return {}

    def seconds(name: str) -> float:
        return float(row.get(name) or 0.0)

    phases = {name: seconds(name) for name in TRAINING}
    phases["training, the rest"] = seconds("time/train_s") - sum(phases.values())
    # Waits are at the end: a wait that overlaps with training takes what training leaves.
    waits = [name for name in row if _WAIT.fullmatch(name)] or ["time/generate_s"]
    for name in ("time/sync_s", "time/counters_s", *waits):
        phases[name] = seconds(name)
    components = {}
    left_s = float(step_s)
    for name, phase_s in phases.items():
        component_s = min(max(phase_s, 0.0), left_s)
        if component_s > 0:
            label = name.removeprefix("time/").removesuffix("_s").replace("_", " ")
            components[label] = component_s
            left_s -= component_s
    if left_s > NEGLIGIBLE * step_s:
        components["other"] = left_s
    return components
