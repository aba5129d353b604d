"""Which pictures a report has: metrics, what they mean together, and what would fill a picture that
has none.

Invariant: data only; a metric that a run does not log leaves its line out, a picture without lines
its sentence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
MOST_OWN = 6  # charts of environments' own metrics
TRAINING = (
    "time/update_s",
    "time/logprobs_s",
    "time/reference_s",
    "time/teacher_s",
    "time/values_s",
)  # of time/train_s


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
    """The sections of a report on these rows: of one run, or of ``several`` together, with fewer
    lines of each."""
    names = {name for row in rows for name, value in row.items() if value is not None}
    rewarded = sorted(name for name in names if name.startswith("reward/mean/"))
    evaluated = sorted(name for name in names if name.startswith("eval/score/"))
    stale = sorted(
        int(m[1])
        for name in names
        if (m := re.fullmatch(r"off_policy/staleness_(\d+)/ratio_mean", name))
    )
    reported = sorted(name for name in names if name.startswith("env/"))
    shares = [
        n for n in reported if all(0 <= row[n] <= 1 for row in rows if row.get(n) is not None)
    ]
    rewards = Chart(
        "Reward by domain",
        tuple(Line(name, name.removeprefix("reward/mean/"), smooth=True) for name in rewarded),
        missing="Needs rows with a domain (data.domain_key).",
    )
    scores = Chart(
        "Score by domain",
        tuple(Line(name, name.removeprefix("eval/score/"), markers=True) for name in evaluated),
        missing="Needs held-out rows with a domain (data.domain_key).",
    )
    by_staleness = Chart(
        "Log-ratio by staleness",
        tuple(
            Line(f"off_policy/staleness_{n}/abs_log_ratio", f"{n} version{'s'[: n != 1]} old")
            for n in stale
        ),
        says="Mean |log(trainer / engine)| of the tokens of each staleness, before the correction.",
        missing="Needs the engine's log-probabilities: a generator that returns rollout_logprobs.",
    )
    decided = {"staleness_control/lr_scale": _CONTROL, "staleness_control/max_staleness": _BOUND}
    control = [chart for name, chart in decided.items() if name in names]
    own = [
        *(shares[start : start + MOST_OWN] for start in range(0, len(shares), MOST_OWN)),
        *([name] for name in reported if name not in shares),
    ][:MOST_OWN]
    environments = [
        Chart(
            f"Environments' own metrics: {group[0].removeprefix('env/')}"
            if len(group) == 1
            else "Environments' own metrics",
            tuple(Line(name, name.removeprefix("env/")) for name in group),
        )
        for group in own
    ]
    parts = dict.fromkeys(part for row in rows for part in step_parts(row))
    steps = Chart(
        "Seconds per step",
        tuple(Line(part, part) for part in parts),
        says="What the trainer does or waits for; the parts add up to the step.",
        kind="stack",
    )
    aim = _SUPERVISED if "sft/loss" in names else _REWARD
    return [
        Section("reward", "Reward and evaluation", (aim, rewards, scores)),
        Section(
            "policy", "The policy's updates", (_KL, _CLIPPED, _ENTROPY, _GRADIENT, _RATE, _CRITIC)
        ),
        Section(
            "staleness",
            "Staleness and correction",
            (_STALENESS, _HISTOGRAM, by_staleness, _ESS, *control, _GAP),
        ),
        Section(
            "responses", "Responses and groups", (_LENGTHS, _TRUNCATED, _SIGNAL, *environments)
        ),
        Section("speed", "Speed", (_THROUGHPUT, _IDLE, _STEP if several else steps)),
    ]


def tokens_by_staleness(rows: Sequence[Row]) -> dict[int, float]:
    """Over all rows."""
    totals: dict[int, float] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None and (match := re.fullmatch(r"staleness/tokens_(-?\d+)", name)):
                totals[int(match[1])] = totals.get(int(match[1]), 0.0) + float(value)
    return dict(sorted(totals.items()))


def step_parts(row: Row) -> dict[str, float]:
    """Seconds of a step by what its trainer did or waited for: disjoint parts, which add up to
    ``time/step_s``."""
    step = row.get("time/step_s")
    if step is None:
        return {}
    waits = [name for name in row if re.fullmatch(r"time/wait_\w+_s", name)] or ["time/generate_s"]
    training = {name: row.get(name) or 0.0 for name in TRAINING}
    rest = (row.get("time/train_s") or 0.0) - sum(training.values())
    seconds = {**training, "training, the rest": rest}
    seconds |= {name: row.get(name) or 0.0 for name in ("time/sync_s", "time/counters_s")}
    seconds |= {
        name: row.get(name) or 0.0 for name in waits
    }  # last: what overlaps with training is no wait
    parts = {}
    left = float(step)
    for name, value in seconds.items():
        taken = min(max(value, 0.0), left)
        if taken > 0:
            parts[re.sub(r"^time/(.*)_s$", r"\1", name).replace("_", " ")] = taken
            left -= taken
    if left > 0.005 * step:
        return {**parts, "other": left}
    return parts
