"""``python -m skyasync.simulate``: the table, the advice, costs from a run, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyasync.simulate.__main__ import main
from skyasync.simulate.advice import advise, best_split
from skyasync.simulate.costs import read_costs
from skyasync.simulate.run import simulate, work
from skyasync.simulate.theory import FORMULAS
from tests.simulate.test_plans import config

pytestmark = pytest.mark.slow

SMALL = [
    "trainer.max_training_steps=30", "trainer.train_batch_size=16", "generator.n_samples_per_prompt=4",
    "generator.num_inference_engines=2", "simulate.slots=8", "simulate.length_mean=100", "simulate.length_max=800",
]  # fmt: skip


@pytest.mark.matrix
def test_the_table_has_a_row_for_each_plan_and_a_recommendation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(SMALL)
    lines = capsys.readouterr().out.splitlines()
    rows = {
        line.split()[0]: line.split()
        for line in lines
        if line.startswith(("sync", "streamed", "one_step_off", "fully_async"))
    }
    assert (
        float(rows["sync"][2])
        == 1.0
        < float(rows["one_step_off"][2])
        < float(rows["fully_async"][2])
    )
    assert float(rows["streamed"][2]) > 1.0
    assert all(float(rows[plan][4]) > 0 for plan in ("sync", "streamed", "one_step_off"))
    assert rows["fully_async"][4] == "-", "no formula"
    assert any("(G+T)/max(G,T)" in line for line in lines)
    assert lines[-1].startswith("recommended: trainer.plan=fully_async trainer.max_staleness=")


def test_an_impossible_setting_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "simulate.slot=3"])
    assert "did you mean simulate.slots" in capsys.readouterr().err


def test_devices_are_split_where_the_work_is() -> None:
    """Training costs a third of generation per device, so of 8 devices 6 generate."""
    cfg = config(num_inference_engines=4, train_s_per_token=0.02 / 8 / 3)
    cfg.trainer.placement.policy_num_gpus_per_node = 4
    split = best_split(cfg)
    assert (
        split.generator.num_inference_engines,
        split.trainer.placement.policy_num_gpus_per_node,
    ) == (6, 2)
    assert work(split).generation_s == pytest.approx(work(split).training_s)


@pytest.mark.parametrize(("interval", "least"), [(4, 3), (40, 39)])
def test_the_advised_staleness_is_at_least_what_weight_syncs_cost(
    interval: int, least: int
) -> None:
    cfg = config(steps=20, sync_interval=interval, train_s_per_token=0.0001)
    assert advise(cfg).max_staleness >= least


def test_the_devices_of_engines_that_have_several_are_split_too() -> None:
    """Two engines of two devices each; generation costs so much that the trainer keeps one device."""
    cfg = config(inference_engine_tensor_parallel_size=2, train_s_per_token=0.0001)
    cfg.trainer.placement.policy_num_gpus_per_node = 4
    split = best_split(cfg)
    assert (
        split.generator.num_inference_engines,
        split.trainer.placement.policy_num_gpus_per_node,
    ) == (3, 2)


@pytest.mark.matrix
def test_the_advised_staleness_is_enough_and_the_next_smaller_is_not() -> None:
    cfg = config("lognormal", length_max=800)
    advice = advise(cfg)
    assert advice.max_staleness > 1
    cfg.trainer.max_training_steps = 40
    cfg.trainer.max_staleness = advice.max_staleness - 1
    assert simulate(cfg, "fully_async").samples_per_s < advice.outcome.samples_per_s


def test_a_synchronous_run_gives_the_costs_of_its_own_step(tmp_path: Path) -> None:
    row = {"time/generate_s": 6.0, "time/train_s": 5.0, "time/sync_s": 0.5, "response/length_mean": 70.0,
           "response/length_max": 100.0}  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"step": i, **row}) for i in range(5))
    )
    cfg = config(steps=20)
    read_costs(cfg, tmp_path)
    assert simulate(cfg, "sync").step_s == pytest.approx(11.5)
    assert simulate(cfg, "one_step_off").step_s == pytest.approx(6.5, rel=0.02)


def test_a_folder_without_a_run_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, f"simulate.from_run={tmp_path}"])
    assert "it has no config.yaml" in capsys.readouterr().err


def test_the_costs_of_a_run_are_those_of_its_batch_devices_and_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 samples take 11.5 seconds."""
    row = {"time/generate_s": 6.0, "time/train_s": 5.0, "time/sync_s": 0.5, "response/length_mean": 30.0,
           "response/length_max": 100.0}  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(json.dumps({"step": i, **row}) for i in range(5))
    )
    settings = {
        "train_batch_size": 16,
        "placement": {"policy_num_nodes": 1, "policy_num_gpus_per_node": 2},
    }
    engines = {"n_samples_per_prompt": 4, "num_inference_engines": 2}
    (tmp_path / "config.yaml").write_text(json.dumps({"trainer": settings, "generator": engines}))
    main([f"simulate.from_run={tmp_path}", "simulate.plans=[sync,streamed,one_step_off,fully_async]",
          "simulate.advise=false", "trainer.max_training_steps=40"])  # fmt: skip
    rows = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith((*FORMULAS, "fully"))
    ]
    throughput = {name: float(samples) for name, samples, *_ in rows}
    assert throughput["sync"] == pytest.approx(64 / 11.5, rel=0.03)
    assert throughput["sync"] < 0.9 * throughput["streamed"], "lengths vary, as in the run"
    assert throughput["one_step_off"] < 0.95 * throughput["fully_async"]
