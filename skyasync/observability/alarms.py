"""What a run's metrics show to be wrong, in words, and what to change.

Invariant: a pure function of the rows of ``metrics.jsonl``. An alarm compares the last ``WINDOW``
steps with the first ones, or with a limit that no healthy recipe comes near; before so many steps
there is none. The recorded rows of healthy runs raise none at any of their steps, and rows of runs
with a fault raise its alarm (tests hold both). Of several alarms the first may be the cause of the
others, never the other way round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from skyasync.observability import jsonl

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

WINDOW = 10  # steps
LONG = 30  # steps after which a reward that has not risen is an alarm
# shares
FEW_MIXED = 0.1
LOW_SAMPLE_SIZE = 0.5
CUT = 0.3
IDLE = 0.85
RISES = 3.0  # times what it was in the first steps
#: Nats per token that a metric must exceed in ``OFTEN`` of the last steps.
DIVERGENCES = {
    "policy/approx_kl": 0.2,
    "off_policy/kl": 0.2,
    "policy/kl_loss": 1.0,
    "reward/kl": 1.0,
}
OFTEN = 3
# nats; share of sync/logprob_gap_limit
GAP = 0.05
NEAR_LIMIT = 0.5
# of what it was in the first steps
LOST_ENTROPY = 0.2
NO_ENTROPY = 0.05
FALL = 0.1  # of the held-out score
# of a run's folder
METRICS = "metrics.jsonl"
RESTARTS = "restarts.jsonl"
SPARING = 50  # seconds between looks at a run, per second that a look takes
#: Alarms of a run that learns nothing: its speed does not matter.
NOT_LEARNING = frozenset(("collapse", "groups_equal", "gradient", "reward_flat"))


@dataclass(frozen=True)
class Alarm:
    """``name`` is one word for programs; ``text`` says what was seen and what to change."""

    name: str
    text: str

    @property
    def nothing_learned(self) -> bool:
        """Whether the run learns nothing."""
        return self.name in NOT_LEARNING


class _Course:
    """A metric's values, in the order of the steps."""

    def __init__(self, rows: Sequence[Row], restarts: Sequence[Row]) -> None:
        self.restarts = restarts
        self.rows = [row for row in rows if row["step"] > 0]
        self.scores = [
            float(row["eval/score"]) for row in rows if row.get("eval/score") is not None
        ]  # step 0 too

    def values(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows if row.get(name) is not None]

    def first_and_last(self, name: str) -> tuple[float, float] | None:
        """Medians of the first and of the last ``WINDOW`` values; None until there are so many."""
        values = self.values(name)
        if len(values) >= WINDOW:
            return (median(values[:WINDOW]), median(values[-WINDOW:]))
        return None

    def last(self, name: str) -> float | None:
        """Median of the last ``WINDOW`` values."""
        both = self.first_and_last(name)
        if both:
            return both[1]
        return None

    def constant_reward(self) -> float | None:
        """The reward of every sample so far; None if it is 0, as after a failure of another kind,
        or differs."""
        rewards = self.values("reward/mean")
        mixed = self.values("reward/mixed_groups")
        if len(rewards) < WINDOW or not mixed or max(mixed) > 0:
            return None
        if rewards[0] != 0 and min(rewards) == max(rewards):
            return rewards[0]
        return None

    def reward_risen(self) -> bool:
        """Whether it is above the first steps by more than chance, and has not fallen since its
        best."""
        rewards = self.values("reward/mean")
        window = min(WINDOW, len(rewards) // 2)
        if window < 2:
            return True  # too early to say
        first = rewards[:window]
        last = rewards[-window:]
        noise = 2 * ((variance(first) + variance(last)) / window) ** 0.5
        best = max(fmean(rewards[n : n + window]) for n in range(len(rewards) - window + 1))
        return fmean(last) > fmean(first) + noise and fmean(last) > fmean(first) + 0.5 * (
            best - fmean(first)
        )


def alarms(rows: Sequence[Row], restarts: Sequence[Row] = ()) -> list[Alarm]:
    """The alarms of a run at its last row, causes before their consequences.

    Args:
        rows: of ``metrics.jsonl``.
        restarts: of ``restarts.jsonl``: workers and controllers that were started again.
    """
    course = _Course(rows, restarts)
    return [Alarm(name, text) for name, check in _CHECKS for text in check(course)]


def alarms_of(folder: Path) -> list[Alarm]:
    """The alarms of the run in a folder at its last step."""
    return alarms(jsonl.read_rows(folder / METRICS), jsonl.read_rows(folder / RESTARTS))


def alarm_lines(run_alarms: Sequence[Alarm]) -> list[str]:
    """One line per alarm; those after the first may be its consequences."""
    lines = []
    for number, alarm in enumerate(run_alarms):
        lead = "may follow from it" if number else "alarm"
        lines.append(f"{lead}: {alarm.text}")
    return lines


class AlarmWatch:
    """Finds the alarms of a run that goes on, each once.

    A look reads all rows of the run. It is left out if nothing was written, and looks take at most
    one in ``SPARING`` seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._next_s = 0.0
        self._written: tuple[int, int] | None = None
        self._reported: set[str] = set()

    def line(self) -> str:
        """The first alarm that is new, with the names of the other new ones; "" if there is
        none."""
        now = self._clock()
        if now < self._next_s:
            return ""
        try:
            stat = (self._folder / METRICS).stat()
            written = (stat.st_mtime_ns, stat.st_size)
            if written == self._written:
                return ""
            self._written = written
            new = [alarm for alarm in alarms_of(self._folder) if alarm.name not in self._reported]
        except FileNotFoundError:  # no step has ended
            return ""
        except Exception as error:  # the run continues without its alarms
            log.warning("no alarms of %s: %s: %s", self._folder, type(error).__name__, error)
            self._next_s = float("inf")
            return ""
        self._next_s = now + SPARING * (self._clock() - now)
        if not new:
            return ""
        self._reported.update(alarm.name for alarm in new)
        line = alarm_lines(new)[0]
        consequences = ", ".join(alarm.name for alarm in new[1:])
        if consequences:
            return f"{line} May follow from it: {consequences}."
        return line


def _collapse(course: _Course) -> Iterator[str]:
    """A single update that ends all learning: rewards below all earlier ones, and equal within
    every group."""
    rows = [
        row
        for row in course.rows
        if None not in (row.get("reward/mean"), row.get("reward/mixed_groups"))
    ]
    informative = [
        number for number, row in enumerate(rows) if row["reward/mixed_groups"] >= FEW_MIXED
    ]
    if len(rows) < WINDOW or not informative:
        return
    before = rows[: informative[-1] + 1]
    after = rows[informative[-1] + 1 :]
    if len(after) < WINDOW // 2:
        return
    reward_before = fmean(row["reward/mean"] for row in before[-WINDOW:])
    reward_after = fmean(row["reward/mean"] for row in after)
    if max(row["reward/mean"] for row in after) < min(row["reward/mean"] for row in before):
        yield (
            f"The policy collapsed before step {after[0]['step']}: the mean reward fell from {reward_before:.2f} to "
            f"{reward_after:.2f} and has stayed there, the same for all samples of a prompt. Updates were too large: "
            f"lower trainer.policy.optimizer_config.lr (here by a factor of 10 or more), lengthen its warm-up "
            f"(trainer.policy.optimizer_config.num_warmup_steps), and start again from an earlier checkpoint."
        )


def _reward_flat(course: _Course) -> Iterator[str]:
    rewards = course.values("reward/mean")
    mixed = course.last("reward/mixed_groups")
    if len(rewards) >= LONG and not course.reward_risen() and (mixed is None or mixed >= FEW_MIXED):
        yield (
            f"The reward has not risen in {len(rewards)} steps ({fmean(rewards[:WINDOW]):.3f} in the first {WINDOW}, "
            f"{fmean(rewards[-WINDOW:]):.3f} in the last). Read some samples: are their rewards right? Then change "
            f"trainer.policy.optimizer_config.lr (3 times larger if the KL stays near 0, smaller if the reward jumps)."
        )


def _reward_constant(course: _Course) -> Iterator[str]:
    reward = course.constant_reward()
    if reward is not None:
        yield (
            f"In 100% of the groups all samples have the same reward: it is {reward:.3g} in all "
            f"{len(course.values('reward/mean'))} steps, whatever the response, so nothing is learned. Check the "
            f"reward function with some samples (skyasync rollout)."
        )


def _groups_equal(course: _Course) -> Iterator[str]:
    if course.constant_reward() is not None:  # that is a fault of the reward, not of the prompts
        return
    mixed = course.last("reward/mixed_groups")
    if mixed is not None and mixed < FEW_MIXED and not course.reward_risen():
        yield (
            f"In {1 - mixed:.0%} of the groups all samples have the same reward, so a group-relative "
            f"estimator has no gradient. Use easier or harder prompts, a reward with partial credit, a larger "
            f"generator.n_samples_per_prompt, or trainer.algorithm.dynamic_sampling.type=variance."
        )


def _entropy(course: _Course) -> Iterator[str]:
    values = course.values("policy/entropy")
    if len(values) < WINDOW or max(values[:3]) <= 0:
        return
    # it may be gone within a few steps
    first = max(values[:3])
    last = median(values[-WINDOW:])
    if last < NO_ENTROPY * first or (last < LOST_ENTROPY * first and not course.reward_risen()):
        yield (
            f"The entropy fell from {first:.3g} to {last:.3g} nats per token: the policy hardly explores. Lower "
            f"trainer.policy.optimizer_config.lr, raise trainer.algorithm.entropy_loss_coef or the upper clip "
            f"(trainer.algorithm.eps_clip_high), or sample at temperature 1."
        )


def _divergence(course: _Course) -> Iterator[str]:
    for name, limit in DIVERGENCES.items():
        values = course.values(name)[-WINDOW:]
        if len(values) == WINDOW and sum(value > limit for value in values) >= OFTEN:
            yield (
                f"The KL divergence is too large: {name} was up to {max(values):.3g} nats per token in the last steps. "
                f"Lower trainer.policy.optimizer_config.lr, make fewer updates per batch, or add "
                f"trainer.algorithm.use_kl_loss=true; trainer.spike_limits can undo such steps."
            )


def _difference(course: _Course) -> Iterator[str]:
    both = course.first_and_last("gap/mean")
    probes = [row for row in course.rows if row.get("sync/logprob_gap_mean") is not None][-3:]
    limits = [NEAR_LIMIT * (row.get("sync/logprob_gap_limit") or 1.0) for row in probes]
    differences = [row["sync/logprob_gap_mean"] for row in probes]
    near = len(course.rows) >= WINDOW and len(probes) == 3
    near = near and all(value > limit for value, limit in zip(differences, limits, strict=True))
    if near or (both and both[1] > max(GAP, RISES * both[0])):
        if near:
            measured = f"{differences[-1]:.3g} nats on verification prompts"
        else:
            measured = f"gap/mean is {both[1] if both else 0:.3g} nats"
        yield (
            f"The log-probabilities of trainer and engine differ too much under the same weights: {measured}. Use the "
            f"same precision on both sides (trainer.policy.model.dtype, generator.dtype), or correct for it with "
            f"trainer.algorithm.off_policy_correction=token_tis."
        )


def _sample_size(course: _Course) -> Iterator[str]:
    share = course.last("off_policy/effective_sample_size")
    if share is not None and share < LOW_SAMPLE_SIZE:
        yield (
            f"The effective sample size is {share:.0%} of the tokens: the policy that trains is far from the one that "
            f"sampled. Lower trainer.policy.optimizer_config.lr or the staleness (trainer.max_staleness, "
            f"trainer.async_queue_size, trainer.sync_interval)."
        )


def _truncation(course: _Course) -> Iterator[str]:
    both = course.first_and_last("response/truncated")
    if both and both[1] > CUT and both[1] >= both[0]:
        start = next(row for row in course.rows if row.get("response/truncated") is not None)
        yield (
            f"{both[1]:.0%} of the responses are cut by their length ({start['response/truncated']:.0%} in step "
            f"{start['step']}). Raise generator.sampling_params.max_generate_length, or penalise length "
            f"(trainer.algorithm.overlong_buffer)."
        )


def _engines_idle(course: _Course) -> Iterator[str]:
    shares = [
        share for share in course.values("idle/engines") if share < 1
    ]  # 1: all is generated, as at the end
    if len(shares) >= WINDOW and (share := median(shares[-WINDOW:])) > IDLE:
        yield (
            f"The engines are idle {share:.0%} of the time: they wait for the trainer, environments or rewards. Give "
            f"the trainer more devices, raise environment.num_workers, or use an asynchronous plan."
        )


def _trainer_idle(course: _Course) -> Iterator[str]:
    share = course.last("idle/trainer")
    if share is not None and share > IDLE:
        yield (
            f"The trainer is idle {share:.0%} of the time: it waits for samples. Start more engines "
            f"(generator.num_inference_engines), generate further ahead, or check in the timeline if environments and "
            f"rewards are slow."
        )


def _no_gradient(course: _Course) -> Iterator[str]:
    norm = course.last("policy/grad_norm")
    if norm == 0:
        yield (
            f"The gradient is {norm:g}: nothing is learned. All groups have equal rewards, or all tokens are masked "
            f"(trainer.algorithm.off_policy_correction, trainer.algorithm.truncated_responses)."
        )


def _score_fell(course: _Course) -> Iterator[str]:
    scores = course.scores
    if len(scores) > 1 and max(scores) - scores[-1] > FALL:
        yield (
            f"The held-out score fell from its best, {max(scores):.2f}, to {scores[-1]:.2f}. Keep the best checkpoint "
            f"with trainer.ckpt_best_metric=eval/score; a lower trainer.policy.optimizer_config.lr is steadier."
        )


def _restarts(course: _Course) -> Iterator[str]:
    counted = [float(row.get("engines/deaths") or 0) for row in course.rows[-WINDOW - 1 :]]
    failures = round(sum(max(0.0, after - before) for before, after in pairwise(counted)))
    if len(course.rows) >= WINDOW:
        since = course.rows[-WINDOW]["step"]
    else:
        since = 0
    again = [str(row.get("what", "a process")) for row in course.restarts if row["step"] >= since]
    if failures or again:
        what = ([f"engines ({failures})"] if failures else []) + again
        yield (
            f"Processes failed in the last {WINDOW} steps and were restarted: {', '.join(what)}. Their files "
            f"in logs/ end with the reason. The most frequent one is lack of memory (skyasync plan estimates it)."
        )


#: In the order in which one can be the cause of the next: what changes the policy or its samples, what then stops
#: learning, its results, and last the speed.
_CHECKS: Sequence[tuple[str, Callable[[_Course], Iterator[str]]]] = (
    ("collapse", _collapse),
    ("groups_equal", _reward_constant),
    ("logprob_difference", _difference),
    ("kl", _divergence),
    ("effective_sample_size", _sample_size),
    ("truncation", _truncation),
    ("entropy", _entropy),
    ("groups_equal", _groups_equal),
    ("gradient", _no_gradient),
    ("reward_flat", _reward_flat),
    ("score", _score_fell),
    ("restarts", _restarts),
    ("engines_idle", _engines_idle),
    ("trainer_idle", _trainer_idle),
)
