"""Minutes to a target: simulated speed times the steps of the law."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isinf
from pathlib import Path

import pytest

from skyasync.errors import UserError
from skyasync.simulate.forecast import Candidate, Forecast, candidates, choose, forecast, read_run_costs
from skyasync.simulate.learning import LearningLaw
from skyasync.simulate.run import simulate, work
from tests.simulate.test_plans import config

pytestmark = pytest.mark.slow

FREE, COSTLY = (LearningLaw(0.4, 1.0, 0.05, cost, 2.0) for cost in (1e-3, 2.0))
SYNC, STALE = Candidate("sync", None, 2, 2), Candidate("fully_async", 4, 2, 2)


def costs() -> dict[str, float]:
    return {"time/generate_s": 6.0, "time/train_s": 5.0, "time/sync_s": 0.5, "response/length_mean": 60.0,
            "response/length_max": 100.0}  # fmt: skip


def test_minutes_are_simulated_seconds_times_the_steps_of_the_law() -> None:
    cfg = config("lognormal", length_max=800, train_s_per_token=0.004)
    (row,) = forecast(cfg, [Candidate("sync", None, 2, 1)], FREE, [FREE], 0.8)
    assert row.minutes == pytest.approx(simulate(cfg, "sync").step_s * FREE.steps_to(0.8, 0.0) / 60, rel=0.05)
    assert row.low == row.high == pytest.approx(row.minutes)
    assert row.fastest == 1.0


def test_staleness_is_taken_where_it_is_free_and_avoided_where_it_is_costly() -> None:
    cfg = config("lognormal", length_max=800, train_s_per_token=0.004)
    for law, plan in ((FREE, "fully_async"), (COSTLY, "sync")):
        rows = forecast(cfg, [SYNC, STALE], law, [law], 0.8)
        assert rows == sorted(rows, key=lambda row: row.minutes)
        assert choose(rows).candidate.plan == plan
        assert [row.fastest for row in rows] == [1.0, 0.0]


def test_the_interval_is_open_if_by_more_than_a_twentieth_of_the_laws_the_reward_does_not_rise() -> None:
    cfg = config(steps=10, train_s_per_token=0.004)
    for flat, high in ((1, False), (2, True), (20, True)):
        laws = [replace(FREE, rate=0.0)] * flat + [FREE] * (20 - flat)
        (row,) = forecast(cfg, [Candidate("sync", None, 2, 1)], FREE, laws, 0.8)
        assert row.fastest == pytest.approx(1 - flat / 20)
        assert isinf(row.high) == high
        assert isinf(row.low) == (flat == 20)


def test_candidates_are_splits_of_the_same_devices_and_bounds_are_of_plans_that_read_them() -> None:
    cfg = config(train_s_per_token=0.004)
    cfg.simulate.plans = ["sync", "fully_async"]
    cfg.trainer.placement.policy_num_gpus_per_node = 2
    found = candidates(cfg, (2, 4))
    assert {one.engines + one.trainers for one in found} == {4}
    assert {(one.plan, one.bound) for one in found} == {("sync", None), ("fully_async", 2), ("fully_async", 4)}
    assert {one.engines for one in found} == {1, 2, 3}


def test_an_engine_of_several_devices_is_moved_with_all_of_them() -> None:
    cfg = config(train_s_per_token=0.004, inference_engine_tensor_parallel_size=2)
    cfg.simulate.plans = ["sync"]
    cfg.trainer.placement.policy_num_gpus_per_node = 3
    assert {(one.engines, one.trainers) for one in candidates(cfg, (1,))} == {(1, 5), (2, 3), (3, 1)}


def test_bounds_that_weight_syncs_exceed_are_no_candidates() -> None:
    cfg = config(train_s_per_token=0.004, sync_interval=4)
    cfg.simulate.plans = ["fully_async"]
    assert {one.bound for one in candidates(cfg, (1, 2, 4, 8))} == {4, 8}
    with pytest.raises(
        UserError, match=r"trainer\.sync_interval=4 lets samples age by 3, more than any .* 1, 2 allows"
    ):
        candidates(cfg, (1, 2))


def test_of_equally_fast_ones_the_least_stale_is_chosen() -> None:
    fast, fresh, slow = (
        Forecast(SYNC, 1.0, staleness, 10, minutes, 1, 2, 0.3)
        for staleness, minutes in ((3.0, 1.0), (1.0, 1.02), (0.0, 1.1))
    )
    assert choose([fast, fresh, slow]) is fresh


@pytest.mark.parametrize("slots", [8, 1024], ids=["several waves", "a slot each"])
def test_a_synchronous_runs_costs_give_its_own_step(tmp_path: Path, slots: int) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps({"step": i, **costs()}) for i in range(5)))
    cfg = config(steps=40)
    cfg.generator.max_num_seqs = slots
    read_run_costs(cfg, tmp_path)
    assert simulate(cfg, "sync").step_s == pytest.approx(11.5, rel=0.03)
    assert cfg.simulate.length_mean == 60.0 and cfg.simulate.length_sigma > 0
    assert cfg.simulate.slots == min(slots, 32)


def test_training_takes_as_long_as_measured_where_the_longest_responses_are_cut(tmp_path: Path) -> None:
    row = costs() | {"response/length_mean": 30.0}
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps({"step": i, **row}) for i in range(5)))
    cfg = config()
    read_run_costs(cfg, tmp_path)
    assert work(cfg).training_s == pytest.approx(5.0)
