"""The guarantees of admission, on generated schedules: the staleness bound, no lost prompts, no deadlock."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.trainer.context import Progress
from skyasync.trainer.plans.admission import Admission, AdmissionLimits

pytestmark = pytest.mark.slow

#: Schedules of two tests each; a third test has as many as both: ten thousand in all.
MANY = settings(max_examples=1500)


@st.composite
def limits(draw: st.DrawFn) -> AdmissionLimits:
    batch = draw(st.integers(1, 4))
    staleness = draw(st.integers(0, 4))
    return AdmissionLimits(
        batch_size=batch,
        total=draw(st.integers(1, 6 * batch)),
        max_staleness=staleness,
        bound=draw(st.sampled_from(["hard", "mean"])),
        generation_ratio=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.7, 2.5])),
        generate_batch_size=draw(st.sampled_from([0, batch, batch + 1, 2 * batch, 50])),
        max_concurrent=draw(st.integers(0, 2 * batch)),
    )


@dataclass
class Run:
    """Drives the admission as a trainer does; ``choose(n)`` selects one of n possible events."""

    limits: AdmissionLimits
    version: int = 0
    position: int = 0
    trained_early: frozenset[int] = frozenset()
    trained: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    most_charged: int = 0
    most_running: int = 0

    def __post_init__(self) -> None:
        self.machine = Admission(self.limits, self.version, self.position, self.trained_early)
        self.progress = Progress(0, 0, self.position, self.trained_early)
        self.admitted_at: dict[int, int] = {}
        self.running: list[int] = []
        self.taken: list[int] = []

    def admit(self) -> None:
        for position in self.machine.admit():
            assert position not in self.admitted_at, "admitted twice"
            self.admitted_at[position] = self.version
            self.running.append(position)
        self.most_charged = max(self.most_charged, self.machine.charged)
        self.most_running = max(self.most_running, self.machine.running)

    def finish(self, which: int) -> None:
        self.machine.finish(self.running.pop(which))

    def take(self) -> bool:
        batch = self.machine.take()
        if batch is None:
            return False
        assert batch.positions == sorted(batch.positions)
        self.taken = batch.positions
        self.trained += batch.positions
        self.ages += [self.version - self.admitted_at[p] for p in batch.positions]
        self.progress.trained([*batch.positions, *batch.rejected])
        return True

    def sync(self) -> None:
        self.taken, self.version = [], self.version + 1
        self.machine.sync(self.version)

    @property
    def over(self) -> bool:
        return self.progress.position == self.limits.total and not self.taken

    def step(self, choose) -> None:  # type: ignore[no-untyped-def]
        """One possible event; fails if there is none (a deadlock)."""
        self.admit()
        events = [lambda which=which: self.finish(which) for which in range(len(self.running))]
        if self.taken:
            events.append(self.sync)
        elif self.take():
            return
        assert events, "deadlock: nothing runs, nothing can be taken, and the run is not over"
        events[choose(len(events))]()


def drive(run: Run, data: st.DataObject, most_events: int = 10**9) -> None:
    """Events in an order that Hypothesis chooses, quickly: one drawn seed determines a long schedule."""
    rng = random.Random(data.draw(st.integers(0, 2**32 - 1)))
    skew = data.draw(st.sampled_from(["any", "newest", "oldest"]))
    for _ in range(most_events):
        if run.over:
            return
        run.step(lambda n: {"newest": n - 1, "oldest": 0}.get(skew, rng.randrange(n)))


@given(limits(), st.data())
@settings(max_examples=3000)
def test_every_prompt_is_trained_exactly_once_in_its_time_and_within_the_slots(
    limits: AdmissionLimits, data: st.DataObject
) -> None:
    """For any order of events."""
    run = Run(limits)
    drive(run, data)
    assert sorted(run.trained) == list(range(limits.total))
    assert limits.bound == "mean" or max(run.ages) <= limits.max_staleness
    assert run.most_charged <= limits.slots
    assert run.most_running <= (limits.max_concurrent or limits.slots)


@dataclass
class Controlled(Run):
    """The bound for new prompts is another one after each sync."""

    bounds: random.Random = field(default_factory=random.Random)

    def sync(self) -> None:
        super().sync()
        before, charged = self.machine.slots, self.machine.charged
        self.machine.max_staleness = self.bounds.randint(0, self.limits.max_staleness)
        admitted = self.machine.admit()
        for position in admitted:
            self.admitted_at[position] = self.version
            self.running.append(position)
        assert not admitted or charged + len(admitted) <= self.machine.slots <= max(
            before, self.limits.slots
        )


@pytest.mark.matrix
@MANY
@given(limits(), st.data())
def test_a_bound_that_falls_and_rises_loses_nothing_and_leaves_the_users_bound_as_it_is(
    limits: AdmissionLimits, data: st.DataObject
) -> None:
    run = Controlled(limits, bounds=random.Random(data.draw(st.integers(0, 2**32 - 1))))
    drive(run, data)
    assert sorted(run.trained) == list(range(limits.total))
    assert limits.bound == "mean" or max(run.ages) <= limits.max_staleness
    assert run.most_charged <= limits.slots


@pytest.mark.parametrize("lowered, slots", [(3, 8), (1, 4), (0, 2)])
def test_a_lower_bound_lets_prompts_in_flight_end_and_admits_fewer(
    lowered: int, slots: int
) -> None:
    run = Run(AdmissionLimits(batch_size=2, total=60, max_staleness=3))
    for _ in range(10):
        run.step(lambda n: 0)
    run.machine.max_staleness = lowered
    in_flight, before = set(run.running), len(run.trained)
    while not run.over:
        run.step(lambda n: 0)
        if len(run.trained) > before + 8:
            assert run.machine.charged <= slots
    assert in_flight <= set(run.trained)
    assert max(run.ages[-20:]) <= lowered, "all prompts take equally long"


@pytest.mark.matrix
@MANY
@given(limits(), st.integers(0, 200), st.integers(0, 200), st.data())
def test_a_run_that_fails_and_resumes_loses_nothing_and_repeats_nothing(
    limits: AdmissionLimits, first: int, second: int, data: st.DataObject
) -> None:
    run, trained = Run(limits), []
    for events in (first, second, 10**9):
        drive(run, data, events)
        trained += run.trained[
            : len(run.trained) - len(run.taken)
        ]  # a taken, untrained batch is lost with its run
        if run.over:
            break
        done = set(trained)
        position = next(p for p in range(limits.total + 1) if p not in done)
        run = Run(limits, run.version, position, frozenset(p for p in done if p > position))
    assert sorted(trained) == list(range(limits.total))


def test_a_batch_names_the_prompts_that_were_rejected_since_the_one_before() -> None:
    machine = Admission(AdmissionLimits(batch_size=2, total=8, max_staleness=1))
    admitted = machine.admit()
    machine.reject(admitted[1])
    machine.finish(admitted[0])
    machine.finish(admitted[2])
    assert machine.take() == ([0, 2], [1])
    machine.finish(admitted[3])
    machine.sync(1)
    for position in machine.admit()[:1]:
        machine.finish(position)
    assert machine.take() == ([3, 4], [])


@given(limits(), st.data())
@settings(max_examples=500, deadline=None)
def test_mean_bound_admits_what_areals_formula_admits(
    limits: AdmissionLimits, data: st.DataObject
) -> None:
    """Compared while the stream lasts, since the formula does not know its end."""
    limits = replace(limits, bound="mean", generation_ratio=0.0, generate_batch_size=0, total=10**6)
    eta, batch, run = limits.max_staleness, limits.batch_size, Run(limits)
    drive(run, data, data.draw(st.integers(0, 100)))
    running, accepted = run.machine.running, len(run.admitted_at) - run.machine.running
    formula = (eta + run.version + 1) * batch - (accepted + running)
    if limits.max_concurrent:
        formula = min(limits.max_concurrent - running, formula)
    assert len(run.machine.admit()) == formula


@given(limits(), st.data())
@settings(max_examples=300, deadline=None)
def test_staleness_zero_gives_the_synchronous_batches_in_order(
    limits: AdmissionLimits, data: st.DataObject
) -> None:
    run = Run(replace(limits, max_staleness=0))
    drive(run, data)
    assert run.trained == list(range(limits.total))
    assert set(run.ages) == {0}


def test_all_slots_in_use_leave_no_choice_after_the_start() -> None:
    """Then timing has no influence: a batch consists of the prompts that were admitted together."""
    rng = np.random.default_rng(0)
    run = Run(AdmissionLimits(batch_size=4, total=80, max_staleness=2))
    while not run.over:
        run.step(lambda n: int(rng.integers(n)))
    assert run.ages[12:72] == [2] * 60  # the last two batches find fewer prompts before them
    assert run.trained[12:] == list(range(12, 80))


def test_free_slots_let_finished_prompts_overtake_a_slow_one_until_its_deadline() -> None:
    machine = Admission(
        AdmissionLimits(batch_size=1, total=10, max_staleness=3, generate_batch_size=2)
    )
    trained = []
    for version in range(3):
        quick = [p for p in machine.admit() if p != 0]  # prompt 0 is slow
        for position in quick:
            machine.finish(position)
        trained += machine.take().positions  # type: ignore[union-attr]
        machine.sync(version + 1)
    machine.finish(machine.admit()[0])
    assert trained == [1, 2, 3]
    assert machine.take() is None, "prompt 0 has to be trained now"
    machine.finish(0)
    assert machine.take().positions == [0]  # type: ignore[union-attr]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 1.3, 2.0])
def test_a_fractional_generation_ratio_admits_prompts_before_the_batch(ratio: float) -> None:
    limits = AdmissionLimits(
        batch_size=10, total=1000, max_staleness=ceil(ratio), generation_ratio=ratio
    )
    assert len(Admission(limits).admit()) == 10 + Fraction(str(ratio)) * 10


def test_slots_that_cannot_hold_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="3 slots cannot hold the 1 x 4 prompts"):
        AdmissionLimits(batch_size=4, total=8, generate_batch_size=3)


# ------------------------------------------------------------------------------------ heavy tails


def ages_of_slow_and_fast(
    durations: np.ndarray, limits: AdmissionLimits, engine_slots: int
) -> dict[int, tuple[int, float]]:
    """Positions in training order -> (version trained, duration), generation and training overlapping.

    ``engine_slots`` prompts run at once, and a training step takes as long as a batch's share of the engines.
    """
    machine, now, free_at, free = Admission(limits), 0.0, 0.0, engine_slots
    waiting: list[int] = []
    running: list[tuple[float, int]] = []
    trained: dict[int, tuple[int, float]] = {}
    step_s = limits.batch_size * durations.mean() / engine_slots
    while len(trained) < limits.total:
        waiting += machine.admit()
        while free and waiting:
            position = waiting.pop(0)
            heapq.heappush(running, (now + durations[position], position))
            free -= 1
        if now >= free_at and (batch := machine.take()):
            trained |= {p: (machine.version, durations[p]) for p in batch.positions}
            free_at = now + step_s
        if running and (now >= free_at or running[0][0] <= free_at):
            now, position = heapq.heappop(running)
            machine.finish(position)
            free += 1
        else:
            now = max(now, free_at)
        if now >= free_at and machine.version * limits.batch_size < len(trained):
            machine.sync(machine.version + 1)
    return trained


def heavy_tails() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    lognormal = rng.lognormal(0.0, 1.0, 4096)
    bimodal = np.where(rng.random(4096) < 0.1, 10.0, 0.5)
    return {"lognormal": lognormal, "bimodal": bimodal}


@pytest.mark.parametrize("distribution", ["lognormal", "bimodal"])
def test_slow_prompts_are_trained_as_often_as_fast_ones(distribution: str) -> None:
    """In every part of the run, not only at its end: the share of slow prompts is that of the stream."""
    durations = heavy_tails()[distribution]
    slow = durations >= np.quantile(durations, 0.92)
    limits = AdmissionLimits(batch_size=64, total=4096, max_staleness=3)
    trained = ages_of_slow_and_fast(durations, limits, engine_slots=64)
    per_step = Counter(version for p, (version, _) in trained.items() if slow[p])
    for first in range(4, 56, 8):  # after the start, in parts of 8 steps
        positions = range(first * 64, (first + 8) * 64)
        expected = int(slow[positions.start : positions.stop].sum())
        assert sum(per_step[v] for v in range(first, first + 8)) == expected


def test_the_mean_bound_trains_fast_prompts_first_and_the_hard_bound_does_not() -> None:
    """The reason for the default "hard": during the run the mean bound accumulates slow prompts, the hard bound
    does not.
    """
    durations = heavy_tails()["lognormal"]
    backlog = {}
    for bound in ("hard", "mean"):
        limits = AdmissionLimits(batch_size=64, total=4096, max_staleness=1, bound=bound)  # type: ignore[arg-type]
        trained = ages_of_slow_and_fast(durations, limits, engine_slots=64)
        backlog[bound] = np.mean([p // 64 != version for p, (version, _) in trained.items()])
    assert backlog["hard"] < 0.02 < backlog["mean"]


# ---------------------------------------------------------------- rejected prompts


@dataclass
class Rejecting(Run):
    """Every prompt whose number is in ``rejected_numbers`` is rejected when it has finished."""

    rejected_numbers: frozenset[int] = frozenset()
    rejected: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)  # their sizes

    def finish(self, which: int) -> None:
        if self.running[which] not in self.rejected_numbers:
            return super().finish(which)
        self.rejected.append(self.running.pop(which))
        self.machine.reject(self.rejected[-1])

    def take(self) -> bool:
        if not super().take():
            return False
        self.batches.append(len(self.taken))
        if not self.taken:  # a step without groups to train still ends
            self.sync()
        return True

    @property
    def over(self) -> bool:
        return super().over or (len(self.batches) >= self.limits.steps and not self.taken)


@st.composite
def rejecting(draw: st.DrawFn) -> Rejecting:
    bounds = draw(limits())
    bounds = replace(
        bounds,
        steps=draw(st.sampled_from([float("inf"), 1, 2, 5])),
        max_rejected=draw(
            st.sampled_from([float("inf"), 0, bounds.batch_size, 3 * bounds.batch_size])
        ),
    )
    return Rejecting(
        bounds, rejected_numbers=frozenset(draw(st.sets(st.integers(0, bounds.total - 1))))
    )


@pytest.mark.matrix
@MANY
@given(rejecting(), st.data())
def test_with_rejections_every_prompt_is_trained_or_rejected_once_and_no_bound_is_broken(
    run: Rejecting, data: st.DataObject
) -> None:
    drive(run, data)
    assert len(set(run.trained + run.rejected)) == len(run.trained) + len(run.rejected)
    assert sorted(run.trained + run.rejected) == sorted(run.admitted_at), (
        "no group is generated without being used"
    )
    assert set(run.trained).isdisjoint(run.rejected_numbers) and run.rejected_numbers.issuperset(
        run.rejected
    )
    assert run.most_charged <= run.limits.slots and len(run.batches) <= run.limits.steps
    if run.limits.bound == "hard":
        assert max(run.ages, default=0) <= run.limits.max_staleness
    if run.limits.steps == float("inf"):
        assert len(run.admitted_at) == run.limits.total
    if run.limits.max_rejected == float("inf"):
        assert all(size == run.limits.batch_size for size in run.batches[:-1]), (
            "all but the last are full"
        )
