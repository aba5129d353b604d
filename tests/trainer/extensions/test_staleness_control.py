"""The step size by staleness: the rule alone, and in real runs in one process."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyasync import TrainerCallback
from skyasync.algorithms.off_policy import (
    Drift,
    drift_by_staleness,
    effective_sample_size,
    off_policy_metrics,
)
from skyasync.config.parts import Plan
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.rollout.types import Group
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.extensions.staleness_control import (
    BETA1,
    BOUND,
    EXPONENT,
    FULL_KL,
    KL_LIMIT,
    LEAST_SAMPLES,
    SCALE,
    WINDOW,
    StalenessBound,
    StalenessControl,
    StepSize,
)
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config, without_times
from tests.trainer.plans.parts import make_run

KLS = st.floats(0, 100) | st.just(math.nan) | st.just(math.inf)
BATCHES = st.dictionaries(
    st.integers(0, 9), st.builds(Drift, st.integers(1, 1000), KLS), max_size=4
)
BOUNDS = st.integers(0, 9)


def policy_of(rule: StepSize, speed: float, noise: float, steps: int) -> list[float]:
    """The factors if the policy moves as the rule assumes and samples have the maximal staleness."""
    moved, factors = [0.0], []
    for step in range(steps):
        staleness = min(step, rule.bound)
        distance = moved[-1] - moved[-1 - staleness]
        factors.append(rule.choose({staleness: Drift(10, noise + speed * distance**2)}))
        moved.append(moved[-1] + factors[-1])
    return factors


@given(st.lists(KLS, max_size=6), st.integers(1, 1000))
def test_samples_of_the_newest_policy_never_change_the_step(kls: list[float], tokens: int) -> None:
    rule = StepSize()
    assert [rule.choose({0: Drift(tokens, kl)}) for kl in kls] == [1.0] * len(kls)


@given(BOUNDS, st.lists(BATCHES, max_size=8))
def test_whatever_is_measured_the_factor_is_between_0_and_1(
    bound: int, batches: list[dict[int, Drift]]
) -> None:
    rule = StepSize(bound)
    for batch in batches:
        assert 0 < rule.choose(batch) <= 1


@given(BOUNDS, st.floats(1e-6, 10), st.floats(0, 1))
def test_the_kl_divergence_settles_at_the_limit_below_it_at_full_steps_and_above_it_at_the_smallest(
    bound: int, speed: float, noise: float
) -> None:
    factors = policy_of(StepSize(bound), speed, noise, 60)
    least = 1 / (1 + bound / 2)
    assert all(least <= factor <= 1 for factor in factors)
    reached = speed * (bound * factors[-1]) ** 2
    assert factors[0] == least
    if reached > 1.01 * KL_LIMIT:
        assert factors[-1] == least
    elif reached < 0.99 * KL_LIMIT:
        assert factors[-1] == 1.0


@given(st.integers(1, 9), st.floats(1e-3, 10))
def test_steps_are_as_small_as_for_the_whole_bound_before_batches_are_so_stale(
    bound: int, speed: float
) -> None:
    factors = policy_of(StepSize(bound), speed, 0.0, 2 * bound)
    steady = max(1 / (1 + bound / 2), min(1.0, math.sqrt(KL_LIMIT / speed) / bound))
    assert factors[1:] == pytest.approx([steady] * (2 * bound - 1))


def test_steps_in_which_the_policy_was_not_trained_move_nothing_and_are_none_of_the_first_ones() -> (
    None
):
    rule = StepSize(4)
    for _ in range(6):  # the critic's warm-up
        rule.record_skipped_step()
    assert rule.choose({4: Drift(1000, 0.0)}) == pytest.approx(1 / 3)
    assert rule.speed is None, "nothing has moved: the divergence of 0 says nothing of full steps"
    rule.record_skipped_step()
    rule.choose({2: Drift(1000, 0.01)})
    assert rule.speed == pytest.approx(0.01 / (1 / 3) ** 2)


def test_tokens_count_by_their_number_and_their_staleness() -> None:
    rule = StepSize(
        factors=[0.5, 0.25]
    )  # distances of 0.25, 0.75, and 1.75 with the step that is not remembered
    rule.choose({1: Drift(3, 0.1), 3: Drift(1, 0.5)})
    assert rule.speed == pytest.approx((3 * 0.1 + 0.5) / (3 * 0.25**2 + 1.75**2))
    assert rule.full_kl == pytest.approx(rule.speed * (3 * 1 + 9) / 4)


@given(BOUNDS, st.lists(BATCHES, min_size=1, max_size=8), st.data())
def test_the_state_goes_through_a_checkpoint(
    bound: int, batches: list[dict[int, Drift]], data: st.DataObject
) -> None:
    rule = StepSize(bound)
    factors = [rule.choose(batch) for batch in batches]
    cut = data.draw(st.integers(0, len(batches)))
    rule = StepSize(bound)
    before = [rule.choose(batch) for batch in batches[:cut]]
    resumed = StepSize(**json.loads(json.dumps(asdict(rule))))
    assert before + [resumed.choose(batch) for batch in batches[cut:]] == factors


def test_a_step_without_a_group_worth_training_on_has_not_moved_the_policy() -> None:
    class NothingInStep2(RayPPOTrainer):
        def filter_groups(self, groups: list[Group]) -> list[Group]:
            return [] if self.global_step == 1 else groups

    correction = {
        "trainer__algorithm__off_policy_correction": "none"
    }  # which the scripted update would not have
    run = make_run(
        NothingInStep2, prompts=12, trainer__staleness_control="auto", **correction
    ).train()
    assert run.trainer.learner.control.state_dict()["factors"] == [1.0, 0.0, 1.0]


MUCH, LITTLE = 0.4, 0.01  # nats per token: effective sample sizes of 0.45 and 0.98


def test_the_bound_is_halved_after_a_window_of_small_sample_sizes_and_rises_step_by_step_to_the_users_limit() -> (
    None
):
    rule, bounds = StalenessBound(5), list[int]()
    for kl in [MUCH] * 60 + [LITTLE] * 100:
        bounds.append(rule.choose(kl))
    changes = [
        (step, after)
        for step, (before, after) in enumerate(pairwise([5, *bounds]))
        if after != before
    ]
    ends = [WINDOW + 5, 2 * WINDOW + 5 + 2]
    assert changes[:2] == [(ends[0] - 1, 2), (ends[1] - 1, 1)]
    assert [bound for _, bound in changes[2:]] == [2, 3, 4, 5] and bounds[-1] == 5
    assert [later - step for (step, _), (later, _) in pairwise(changes[2:])] == [10, 11, 12]


@given(st.integers(1, 9), st.integers(1, 9), st.lists(st.floats(-1, 5), max_size=120))
def test_the_bound_stays_between_what_the_plan_needs_and_what_the_user_allows(
    most: int, least: int, kls: list[float]
) -> None:
    rule = StalenessBound(most, least)
    bounds = [rule.choose(kl) for kl in kls]
    assert all(min(least, most) <= bound <= most for bound in bounds)
    assert bounds[: WINDOW + most - 1] == [most] * min(len(bounds), WINDOW + most - 1)


def test_one_batch_between_is_enough_to_wait_again() -> None:
    rule = StalenessBound(2)
    kls = ([MUCH] * (WINDOW + 1) + [0.1]) * 4
    assert {rule.choose(kl) for kl in kls} == {2}


@given(st.integers(1, 9), st.lists(st.floats(0, 2), min_size=1, max_size=60), st.data())
def test_the_bounds_state_goes_through_a_checkpoint(
    most: int, kls: list[float], data: st.DataObject
) -> None:
    rule = StalenessBound(most)
    bounds = [rule.choose(kl) for kl in kls]
    cut, rule = data.draw(st.integers(0, len(kls))), StalenessBound(most)
    before = [rule.choose(kl) for kl in kls[:cut]]
    resumed = StalenessBound(**json.loads(json.dumps(asdict(rule))))
    assert before + [resumed.choose(kl) for kl in kls[cut:]] == bounds


def batch(staleness: list[list[int]], drift: float) -> SimpleNamespace:
    """A batch of version 5; -1 is no loss token."""
    ages = torch.tensor(staleness)
    return SimpleNamespace(
        loss_mask=ages >= 0,
        versions=torch.where(ages >= 0, 5 - ages, -1),
        behaviour_logprobs=torch.full(ages.shape, -1.0),
        proximal_logprobs=-1.0 + drift * ages,
    )


def test_the_drift_of_parts_is_the_metric_of_the_whole_batch() -> None:
    parts = [batch([[-1, 0, 1], [-1, 1, 2]], 0.1), batch([[2, -1, 1]], -0.3)]
    found = drift_by_staleness(parts, 5)
    assert {s: drift.tokens for s, drift in found.items()} == {0: 1, 1: 3, 2: 2}
    whole = SimpleNamespace(
        **{name: torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])}
    )
    expected = off_policy_metrics(
        whole.proximal_logprobs, whole.behaviour_logprobs, whole.loss_mask, 5 - whole.versions
    )
    for s, drift in found.items():
        assert drift.kl == pytest.approx(expected[f"off_policy/staleness_{s}/kl"], abs=1e-7)
    parts[0].proximal_logprobs = None
    assert math.isnan(drift_by_staleness(parts, 5)[1].kl)


@pytest.mark.parametrize(
    ("plan", "settings", "most"),
    [
        ("sync", {}, 0), ("sync", {"sync_interval": 3}, 2), ("streamed", {}, 0), ("one_step_off", {}, 1),
        ("one_step_off", {"async_queue_size": 4, "sync_interval": 2}, 5), ("fully_async", {"max_staleness": 0}, 0),
        ("fully_async", {"max_staleness": 4, "sync_interval": 2}, 4),
    ],
)  # fmt: skip
def test_the_bound_is_that_of_the_plans_settings(
    plan: str, settings: dict[str, int], most: int
) -> None:
    cfg = Config()
    vars(cfg.trainer).update(settings)
    chosen = Plan.of(cfg, plan)
    assert chosen is not None and chosen.most_stale(cfg) == most


def test_a_decision_is_logged_in_words_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = SimpleNamespace(phases=SimpleNamespace(metrics={}), cfg=Config())
    control, batches = (
        StalenessControl(context, bound=2),
        [batch([[0]], 0.0), batch([[1]], 0.4), batch([[1]], 0.0)],
    )
    with caplog.at_level("INFO"):
        factors = [control.choose([made], 5) for made in batches]  # type: ignore[list-item]
    assert factors == [1 / 2, 1 / 2, 2 / 3] and context.phases.metrics[SCALE] == 2 / 3
    first, second = [message for message in caplog.messages if "multiplied" in message]
    assert (
        "multiplied by 0.5" in first
        and "0.0 versions old, nothing is known yet of the size of steps" in first
    )
    assert (
        "multiplied by 0.67" in second
        and "1.0 versions old, they would be 0.18 nats per token" in second
    )


def test_the_momentum_is_logged_and_is_the_settings_again_without_staleness(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context: Any = SimpleNamespace(phases=SimpleNamespace(metrics={}), cfg=Config())
    control = StalenessControl(context, bound=0)
    with caplog.at_level("INFO"):
        for ages, beta1 in (
            ([[0]], None),
            ([[1]], 0.45),
            ([[4]], 0.18),
            ([[8]], 0.1),
            ([[0]], None),
        ):
            control.choose([batch(ages, 0.0)], 5)  # type: ignore[list-item]
            assert control.beta1 == (beta1 if beta1 is None else pytest.approx(beta1))
    said = [message for message in caplog.messages if "first decay rate" in message]
    assert ["is 0.45, and 0.9 by" in message for message in said] == [True, False, False]


def test_correction_and_bound_are_decided_in_words_and_go_through_a_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context: Any = SimpleNamespace(phases=SimpleNamespace(metrics={}), cfg=Config())
    control = StalenessControl(context, 2, lowest_bound=1)
    made: Any = batch(
        [[-1, 0, 0], [-1, 1, 1]], 1.2
    )  # two tokens of staleness 1 whose ratio is exp(1.2)
    far: Any = batch([[-1, 1, 1], [-1, 1, 1]], 1.2)
    factors = torch.tensor(
        [[9.0, 1.0, 0.0], [9.0, 0.01, 40.0]]
    )  # not of the prompt, and 0 is masked: 1, 0.01, 40
    control.choose([made], 5, [factors])
    kept = torch.tensor([[1.0, 0.01, 40.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert 0 < control.exponent < 1
    assert effective_sample_size(kept**control.exponent, mask) == pytest.approx(
        LEAST_SAMPLES, abs=1e-3
    )
    assert (
        context.phases.metrics[EXPONENT] == control.exponent and context.phases.metrics[BOUND] == 2
    )
    with caplog.at_level("INFO"):
        for step in range(6, 6 + WINDOW + 2):
            control.choose([far], step - 1, [torch.ones(2, 3)])
    assert control.exponent == 1.0 and control.staleness_bound == 1
    assert any("raised to the power 1 from now on" in message for message in caplog.messages)
    (bound,) = [message for message in caplog.messages if "versions old from now on" in message]
    assert (
        "may be 1 versions old from now on instead of 2" in bound
        and "below 0.5 for 10 steps" in bound
    )
    resumed = StalenessControl(context, 2, lowest_bound=1)
    resumed.load_state_dict(json.loads(json.dumps(control.state_dict())))
    assert resumed.state_dict() == control.state_dict() and resumed.staleness_bound == 1
    narrower = StalenessControl(context, 1, lowest_bound=1)
    narrower.load_state_dict(control.state_dict())
    assert narrower.staleness_bound == 1


def test_noise_between_engine_and_trainer_does_not_lower_the_bound() -> None:
    context: Any = SimpleNamespace(phases=SimpleNamespace(metrics={}), cfg=Config())
    control, ages = StalenessControl(context, 2, lowest_bound=1), torch.tensor([[0, 1, 1, 2]])
    noisy: Any = SimpleNamespace(
        loss_mask=ages >= 0,
        versions=5 - ages,
        behaviour_logprobs=torch.full(ages.shape, -1.0),
        proximal_logprobs=torch.full(ages.shape, 0.2),
    )
    for _ in range(3 * WINDOW):
        control.choose([noisy], 5)
    assert control.staleness_bound == 2


# ---------------------------------------------------------------- in runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


@pytest.mark.slow
async def test_a_synchronous_run_with_control_is_the_plain_run_bitwise(model: str) -> None:
    plain, auto = [
        await LocalRun(RayPPOTrainer, config(model, steps=2, staleness_control=control)).train()
        for control in ("none", "auto")
    ]
    extra = {SCALE: 1.0, FULL_KL: 0.0, BETA1: 0.9}
    expected = {
        s: row | (extra if s else {}) for s, row in without_times(plain.tracker.rows).items()
    }
    assert without_times(auto.tracker.rows) == expected
    for name, weights in plain.dispatch.weights().items():
        assert torch.equal(auto.dispatch.weights()[name], weights), name


class Broken(Exception):
    """Ends a run with an error."""


class Stop(TrainerCallback):
    """Ends a run at the end of the fourth step, before its checkpoint."""

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_step == 4:
            raise Broken


def stale_run(model: str, folder: Path, lr: float, **settings: Any) -> LocalRun:
    """A run with staleness 1, in batches that do not depend on the clock."""
    cfg = config(
        model, steps=6, ckpt_path=str(folder), ckpt_interval=1, staleness_control="auto", **settings
    )
    cfg.generator.sampling_params.seed = 5  # a request is sampled by its name, in any run
    cfg.trainer.policy.optimizer_config.lr = lr
    return LocalRun(AsyncRayPPOTrainer, cfg)


@pytest.mark.slow
async def test_a_stale_run_takes_smaller_steps_and_resumes_bitwise(
    model: str, tmp_path: Path
) -> None:
    lr = 3e-3
    whole = await stale_run(model, tmp_path / "whole", lr).train()
    factors = [whole.tracker.rows[step][SCALE] for step in range(1, 7)]
    assert factors[0] == 2 / 3 and min(factors) >= 2 / 3 and len(set(factors)) > 3, factors
    assert [whole.tracker.rows[step]["policy/lr"] for step in range(1, 7)] == [
        lr * factor for factor in factors
    ]
    worker: Any = whole.dispatch._policy
    assert {group["betas"][0] for group in worker.backend.optimizer.param_groups} == {0.9 / 2}
    first = stale_run(model, tmp_path / "cut", lr)
    first.trainer.callbacks.append(Stop())
    with pytest.raises(Broken):
        await first.train()
    resumed = await stale_run(model, tmp_path / "cut", lr, resume_mode="latest").train()
    assert [resumed.tracker.rows[step][SCALE] for step in (4, 5, 6)] == factors[3:]
    for name, weights in whole.dispatch.weights().items():
        assert torch.equal(resumed.dispatch.weights()[name], weights), name


@pytest.mark.slow
@pytest.mark.matrix
async def test_a_smoothed_correction_trains_otherwise_and_resumes_bitwise(
    model: str, tmp_path: Path
) -> None:
    def run(folder: str, **settings: Any) -> LocalRun:
        made = stale_run(model, tmp_path / folder, 3e-2, **settings)
        made.cfg.trainer.algorithm.off_policy_correction = "sequence_tis"
        return LocalRun(AsyncRayPPOTrainer, made.cfg)

    whole = await run("whole").train()
    exponents = [whole.tracker.rows[step][EXPONENT] for step in range(1, 7)]
    assert exponents[0] == 1.0 and min(exponents) < 1.0
    used = [made.correction_exponent for made in whole.dispatch.batches]
    assert used == [1.0, *exponents[:-1]], "of the batch before"
    assert BOUND not in whole.tracker.rows[6], "the queue of one_step_off is as long as it is"
    first = run("cut")
    first.trainer.callbacks.append(Stop())
    with pytest.raises(Broken):
        await first.train()
    resumed = await run("cut", resume_mode="latest").train()
    assert [resumed.tracker.rows[step][EXPONENT] for step in (4, 5, 6)] == exponents[3:]
    for name, weights in whole.dispatch.weights().items():
        assert torch.equal(resumed.dispatch.weights()[name], weights), name


@pytest.mark.slow
async def test_admission_follows_the_bound_and_a_resumed_run_begins_with_it(
    model: str, tmp_path: Path
) -> None:
    class Lowers(TrainerCallback):
        """Decides for 1 in the second step."""

        def on_step_begin(self, trainer: Any, step: int) -> None:
            if step == 2:
                rule = trainer.learner.control._bound
                rule.low, rule.choose = rule.bound + WINDOW, lambda kl: rule.bound
                rule.bound = 1

    def run(steps: int, resume_mode: str) -> LocalRun:
        saved: dict[str, Any] = {
            "ckpt_path": str(tmp_path),
            "ckpt_interval": 1,
            "resume_mode": resume_mode,
        }
        return LocalRun(
            FullyAsyncRayPPOTrainer,
            config(model, steps=steps, max_staleness=3, staleness_control="auto", **saved),
        )

    first = run(6, "none")
    first.trainer.callbacks.append(Lowers())
    await first.train()
    assert [first.tracker.rows[step][BOUND] for step in range(1, 7)] == [3.0] + [1.0] * 5
    admission = first.trainer.admission  # type: ignore[attr-defined]
    assert admission.max_staleness == 1 and admission.slots == 8
    second = await run(8, "latest").train()
    assert second.tracker.rows[7][BOUND] == 1.0
    assert second.trainer.admission.slots == 8  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_stale_samples_whose_log_probabilities_are_unknown_are_an_error(model: str) -> None:
    class Forgetful(AsyncRayPPOTrainer):
        def postprocess_generator_output(self, groups: Any) -> Any:
            for trajectory in (t for group in groups for t in group.trajectories):
                for action in trajectory.actions:
                    action.logprobs[:] = math.nan
            return groups

    cfg = config(model, steps=3, staleness_control="auto", allow_uncorrected=True)
    cfg.trainer.algorithm.off_policy_correction = "none"
    with pytest.raises(UserError, match=r"trainer\.staleness_control=auto .* rollout_logprobs"):
        await LocalRun(Forgetful, cfg).train()
