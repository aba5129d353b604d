"""A simulation's costs from the files of a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyasync.simulate.costs import read_run_costs
from skyasync.simulate.run import simulate, work
from tests.simulate.test_plans import config


def costs() -> dict[str, float]:
    return {"time/generate_s": 6.0, "time/train_s": 5.0, "time/sync_s": 0.5, "response/length_mean": 60.0,
            "response/length_max": 100.0}  # fmt: skip


@pytest.mark.parametrize("slots", [8, 1024], ids=["several waves", "a slot each"])
def test_a_synchronous_runs_costs_give_its_own_step(tmp_path: Path, slots: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"step": i, **costs()}) for i in range(5))
    )
    cfg = config(steps=40)
    cfg.generator.max_num_seqs = slots
    read_run_costs(cfg, tmp_path)
    assert simulate(cfg, "sync").step_s == pytest.approx(11.5, rel=0.03)
    assert cfg.simulate.length_mean == 60.0 and cfg.simulate.length_sigma > 0
    assert cfg.simulate.slots == min(slots, 32)


def test_training_takes_as_long_as_measured_where_the_longest_responses_are_cut(
    tmp_path: Path,
) -> None:
    row = costs() | {"response/length_mean": 30.0}
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"step": i, **row}) for i in range(5))
    )
    cfg = config()
    read_run_costs(cfg, tmp_path)
    assert work(cfg).training_s == pytest.approx(5.0)
