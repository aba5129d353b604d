"""Faults that the metrics of a run show, in words, and what to change.

Invariant: a pure function of the rows of ``metrics.jsonl``. An alarm compares the last ``WINDOW``
steps with the first ones, or with a limit that no healthy recipe comes near; before so many steps
there is none. The recorded rows of healthy runs raise none at any of their steps, and rows of runs
with a fault raise its alarm (tests check both). Of several alarms the first may be the cause of the
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

WINDOW = 10  # steps: their median is steady, and a fault is seen within minutes
LONG = 30  # steps after which a reward that has not risen is an alarm
FEW_MIXED = 0.1  # share of groups with different rewards, below which a batch teaches little
LOW_SAMPLE_SIZE = 0.5  # share of the tokens
CUT = 0.3  # share of the responses
IDLE = 0.85  # share of the time
RISES = 3.0  # factor over the first steps at which a difference is an alarm
#: Nats per token that a metric must exceed in ``OFTEN`` of the last steps.
DIVERGENCES = {
    "policy/approx_kl": 0.2,
    "off_policy/kl": 0.2,
    "policy/kl_loss": 1.0,
    "reward/kl": 1.0,
}
OFTEN = 3  # steps: a single large one may be chance
GAP = 0.05  # nats: rounding of the same precision on both sides stays below
NEAR_LIMIT = 0.5  # share of sync/logprob_gap_limit
LOST_ENTROPY = 0.2  # share of the entropy in the first steps, for a policy that does not learn
NO_ENTROPY = 0.05  # the same, also for a policy that learns
FALL = 0.1  # of the held-out score
METRICS = "metrics.jsonl"  # in a run's folder
RESTARTS = "restarts.jsonl"
SPARING = 50  # seconds between looks at a run, per second that a look takes: 2% of the time
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
    """The rows of a run, and the values of a metric in the order of the steps."""

    def __init__(self, rows: Sequence[Row], restarts: Sequence[Row]) -> None:
        self.restarts = restarts
        self.rows = [row for row in rows if row["step"] > 0]
        self.scores = jsonl.values_of(rows, "eval/score")  # with that of step 0, before training

    def values(self, name: str) -> list[float]:
        return jsonl.values_of(self.rows, name)

    def first_and_last(self, name: str) -> tuple[float, float] | None:
        """Medians of the first and of the last ``WINDOW`` values; None until there are so many."""
        values = self.values(name)
        if len(values) >= WINDOW:
            return (median(values[:WINDOW]), median(values[-WINDOW:]))
        return None

    def last(self, name: str) -> float | None:
        """Median of the last ``WINDOW`` values; None until there are so many."""
        medians = self.first_and_last(name)
        if medians:
            return medians[1]
        return None

    def constant_reward(self) -> float | None:
        """The reward of every sample so far; None if rewards differ.

        None if it is 0, too, as after a failure of another kind.
        """
        rewards = self.values("reward/mean")
        mixed = self.values("reward/mixed_groups")
        if len(rewards) < WINDOW or not mixed or max(mixed) > 0:
            return None
        if rewards[0] != 0 and min(rewards) == max(rewards):
            return rewards[0]
        return None

    def reward_risen(self) -> bool:
        """Whether the reward rose by more than chance, and at least half of its best rise is left."""
        rewards = self.values("reward/mean")
        window = min(WINDOW, len(rewards) // 2)
        if window < 2:
            return True  # too early to say
        early = rewards[:window]
        late = rewards[-window:]
        # Two standard errors of the difference of both means.
        noise = 2 * ((variance(early) + variance(late)) / window) ** 0.5
        best = max(fmean(rewards[n : n + window]) for n in range(len(rewards) - window + 1))
        start = fmean(early)
        end = fmean(late)
        return end > start + noise and end > start + 0.5 * (best - start)


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
        """The first new alarm, with the names of the other new ones; "" if there is none."""
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
    """An update that ends all learning: lower rewards than ever, equal within every group."""
    rows = jsonl.rows_with(course.rows, "reward/mean")
    rows = jsonl.rows_with(rows, "reward/mixed_groups")
    collapse = 0  # the row after the last step that had informative groups
    for number, row in enumerate(rows):
        if row["reward/mixed_groups"] >= FEW_MIXED:
            collapse = number + 1
    if len(rows) < WINDOW or not collapse:
        return
    if len(rows) - collapse < WINDOW // 2:  # a few batches may be uninformative by chance
        return
    rewards = [row["reward/mean"] for row in rows]
    old_rewards = rewards[:collapse]
    new_rewards = rewards[collapse:]
    if max(new_rewards) < min(old_rewards):
        old_reward = fmean(old_rewards[-WINDOW:])
        new_reward = fmean(new_rewards)
        yield (
            f"The policy collapsed before step {rows[collapse]['step']}: the mean reward fell from {old_reward:.2f} to "
            f"{new_reward:.2f} and has stayed there, the same for all samples of a prompt. Updates were too large: "
            f"lower trainer.policy.optimizer_config.lr (here by a factor of 10 or more), lengthen its warm-up "
            f"(trainer.policy.optimizer_config.num_warmup_steps), and start again from an earlier checkpoint."
        )


def _reward_flat(course: _Course) -> Iterator[str]:
    rewards = course.values("reward/mean")
    mixed = course.last("reward/mixed_groups")
    if mixed is not None and mixed < FEW_MIXED:  # another alarm
        return
    if len(rewards) >= LONG and not course.reward_risen():
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
    if len(values) < WINDOW:
        return
    old = max(values[:3])  # of few steps: the entropy may be gone after them
    new = median(values[-WINDOW:])
    if old <= 0:
        return
    # A policy that learns a task loses much of its entropy, too.
    if new < NO_ENTROPY * old or (new < LOST_ENTROPY * old and not course.reward_risen()):
        yield (
            f"The entropy fell from {old:.3g} to {new:.3g} nats per token: the policy hardly explores. Lower "
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
    measured = _near_limit(course) or _difference_risen(course)
    if measured:
        yield (
            f"The log-probabilities of trainer and engine differ too much under the same weights: {measured}. Use the "
            f"same precision on both sides (trainer.policy.model.dtype, generator.dtype), or correct for it with "
            f"trainer.algorithm.off_policy_correction=token_tis."
        )


def _near_limit(course: _Course) -> str:
    """The difference on verification prompts if the last three were near their limit, else ""."""
    rows = jsonl.rows_with(course.rows, "sync/logprob_gap_mean")[-3:]
    if len(course.rows) < WINDOW or len(rows) < 3:
        return ""
    for row in rows:
        limit = row.get("sync/logprob_gap_limit") or 1.0
        if row["sync/logprob_gap_mean"] <= NEAR_LIMIT * limit:
            return ""
    return f"{rows[-1]['sync/logprob_gap_mean']:.3g} nats on verification prompts"


def _difference_risen(course: _Course) -> str:
    """The difference on samples if it is large and has risen, else ""."""
    medians = course.first_and_last("gap/mean")
    if medians is None:
        return ""
    old, new = medians
    if new > max(GAP, RISES * old):
        return f"gap/mean is {new:.3g} nats"
    return ""


def _sample_size(course: _Course) -> Iterator[str]:
    share = course.last("off_policy/effective_sample_size")
    if share is not None and share < LOW_SAMPLE_SIZE:
        yield (
            f"The effective sample size is {share:.0%} of the tokens: the policy that trains is far from the one that "
            f"sampled. Lower trainer.policy.optimizer_config.lr or the staleness (trainer.max_staleness, "
            f"trainer.async_queue_size, trainer.sync_interval)."
        )


def _truncation(course: _Course) -> Iterator[str]:
    medians = course.first_and_last("response/truncated")
    if medians is None:
        return
    old, new = medians
    if new > CUT and new >= old:  # a share that falls is being learned away
        start = jsonl.rows_with(course.rows, "response/truncated")[0]
        yield (
            f"{new:.0%} of the responses are cut by their length ({start['response/truncated']:.0%} in step "
            f"{start['step']}). Raise generator.sampling_params.max_generate_length, or penalise length "
            f"(trainer.algorithm.overlong_buffer)."
        )


def _engines_idle(course: _Course) -> Iterator[str]:
    # At the end of a run all is generated: the share is 1.
    shares = [share for share in course.values("idle/engines") if share < 1]
    if len(shares) < WINDOW:
        return
    share = median(shares[-WINDOW:])
    if share > IDLE:
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
    # A counter that begins at 0 again after a resume; one row more than steps, for differences.
    counts = [float(row.get("engines/deaths") or 0) for row in course.rows[-WINDOW - 1 :]]
    failures = 0.0
    for old_count, new_count in pairwise(counts):
        failures += max(0.0, new_count - old_count)
    since = 0
    if len(course.rows) >= WINDOW:
        since = course.rows[-WINDOW]["step"]
    processes = [f"engines ({round(failures)})"] if round(failures) else []
    for row in course.restarts:
        if row["step"] >= since:
            processes.append(str(row.get("what", "a process")))
    if processes:
        yield (
            f"Processes failed in the last {WINDOW} steps and were restarted: {', '.join(processes)}. Their files "
            f"in logs/ end with the reason. The most frequent one is lack of memory (skyasync plan estimates it)."
        )


#: In the order in which one can be the cause of the next: changes of the policy or its samples,
#: then the end of learning, its results, and the speed at the end.
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
