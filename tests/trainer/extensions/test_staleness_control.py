"""The step size by staleness: the rule alone, and in real runs in one process."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyasync import TrainerCallback
from skyasync.algorithms.off_policy import Drift, drift_by_staleness, off_policy_metrics
from skyasync.config.parts import Plan
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.extensions.staleness_control import FULL_KL, KL_LIMIT, SCALE, StalenessControl, StepSize
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config, without_times

KLS = st.floats(0, 100) | st.just(math.nan) | st.just(math.inf)
BATCHES = st.dictionaries(st.integers(0, 9), st.builds(Drift, st.integers(1, 1000), KLS), max_size=4)
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
def test_whatever_is_measured_the_factor_is_between_0_and_1(bound: int, batches: list[dict[int, Drift]]) -> None:
    rule = StepSize(bound)
    for batch in batches:
        assert 0 < rule.choose(batch) <= 1


@given(BOUNDS, st.floats(1e-6, 10), st.floats(0, 1))
def test_the_kl_divergence_settles_at_the_limit_below_it_at_full_steps_and_above_it_at_the_smallest(
    bound: int, speed: float, noise: float
) -> None:
    factors = policy_of(StepSize(bound), speed, noise, 60)
    assert all(1 / (1 + bound) <= factor <= 1 for factor in factors)
    reached, least = speed * (bound * factors[-1]) ** 2, 1 / (1 + bound)
    assert factors[0] == least
    if reached > 1.01 * KL_LIMIT:
        assert factors[-1] == least
    elif reached < 0.99 * KL_LIMIT:
        assert factors[-1] == 1.0


@given(st.integers(1, 9), st.floats(1e-3, 10))
def test_steps_are_as_small_as_for_the_whole_bound_before_batches_are_so_stale(bound: int, speed: float) -> None:
    factors = policy_of(StepSize(bound), speed, 0.0, 2 * bound)
    steady = max(1 / (1 + bound), min(1.0, math.sqrt(KL_LIMIT / speed) / bound))
    assert factors[1:] == pytest.approx([steady] * (2 * bound - 1))


def test_tokens_count_by_their_number_and_their_staleness() -> None:
    rule = StepSize(factors=[0.5, 0.25])  # distances of 0.25, 0.75, and 1.75 with the step that is not remembered
    rule.choose({1: Drift(3, 0.1), 3: Drift(1, 0.5)})
    assert rule.speed == pytest.approx((3 * 0.1 + 0.5) / (3 * 0.25**2 + 1.75**2))
    assert rule.full_kl == pytest.approx(rule.speed * (3 * 1 + 9) / 4)


@given(BOUNDS, st.lists(BATCHES, min_size=1, max_size=8), st.data())
def test_the_state_goes_through_a_checkpoint(bound: int, batches: list[dict[int, Drift]], data: st.DataObject) -> None:
    rule = StepSize(bound)
    factors = [rule.choose(batch) for batch in batches]
    cut = data.draw(st.integers(0, len(batches)))
    rule = StepSize(bound)
    before = [rule.choose(batch) for batch in batches[:cut]]
    resumed = StepSize(**json.loads(json.dumps(asdict(rule))))
    assert before + [resumed.choose(batch) for batch in batches[cut:]] == factors


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
    whole = SimpleNamespace(**{name: torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])})
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
def test_the_bound_is_that_of_the_plans_settings(plan: str, settings: dict[str, int], most: int) -> None:
    cfg = Config()
    vars(cfg.trainer).update(settings)
    chosen = Plan.of(cfg, plan)
    assert chosen is not None and chosen.most_stale(cfg) == most


def test_a_decision_is_logged_in_words_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = SimpleNamespace(phases=SimpleNamespace(metrics={}))
    control, batches = StalenessControl(context, bound=2), [batch([[0]], 0.0), batch([[1]], 0.4), batch([[1]], 0.0)]
    with caplog.at_level("INFO"):
        factors = [control.choose([made], 5) for made in batches]  # type: ignore[list-item]
    assert factors == [1 / 3, 1 / 3, 1 / 2] and context.phases.metrics[SCALE] == 1 / 2
    first, second = caplog.messages
    assert "multiplied by 0.33" in first and "0.0 versions old, nothing is known yet of the size of steps" in first
    assert "multiplied by 0.5" in second and "1.0 versions old, they would be 0.41 nats per token" in second


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
    extra = {SCALE: 1.0, FULL_KL: 0.0}
    expected = {s: row | (extra if s else {}) for s, row in without_times(plain.tracker.rows).items()}
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
    cfg = config(model, steps=6, ckpt_path=str(folder), ckpt_interval=1, staleness_control="auto", **settings)
    cfg.generator.sampling_params.seed = 5  # a request is sampled by its name, in any run
    cfg.trainer.policy.optimizer_config.lr = lr
    return LocalRun(AsyncRayPPOTrainer, cfg)


@pytest.mark.slow
async def test_a_stale_run_takes_smaller_steps_and_resumes_bitwise(model: str, tmp_path: Path) -> None:
    lr = 3e-3
    whole = await stale_run(model, tmp_path / "whole", lr).train()
    factors = [whole.tracker.rows[step][SCALE] for step in range(1, 7)]
    assert factors[0] == 1 / 2 and min(factors) >= 1 / 2 and len(set(factors)) > 3, factors
    assert [whole.tracker.rows[step]["policy/lr"] for step in range(1, 7)] == [lr * factor for factor in factors]
    first = stale_run(model, tmp_path / "cut", lr)
    first.trainer.callbacks.append(Stop())
    with pytest.raises(Broken):
        await first.train()
    resumed = await stale_run(model, tmp_path / "cut", lr, resume_mode="latest").train()
    assert [resumed.tracker.rows[step][SCALE] for step in (4, 5, 6)] == factors[3:]
    for name, weights in whole.dispatch.weights().items():
        assert torch.equal(resumed.dispatch.weights()[name], weights), name


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
