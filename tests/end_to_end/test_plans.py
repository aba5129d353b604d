"""Both plans in real runs: their guarantees on staleness, weights, repetition and the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyasync import load_config
from skyasync.config.load import dump_config
from skyasync.observability.run_dir import read_status
from tests.end_to_end.runs import Train, Trained
from tests.observability import chrome_trace, perfetto

pytestmark = pytest.mark.slow

GAP = 1e-4  # between the log-probabilities of trainer and engine, in float32


def test_every_step_is_logged_once_and_every_sync_arrives(whole_run: Trained) -> None:
    assert whole_run.series("step") == [1, 2, 3, 4, 5, 6]
    assert max(whole_run.series("sync/logprob_gap")) <= GAP
    assert max(row["gap/max"] for row in whole_run.metrics if "gap/max" in row) <= GAP
    assert all(norm > 0 for norm in whole_run.series("policy/grad_norm"))


def test_staleness_is_zero_in_sync_and_settles_at_one_in_one_step_off(
    sync_run: Trained, one_step_off_run: Trained
) -> None:
    for run, settled in ((sync_run, 0), (one_step_off_run, 1)):
        for extreme in ("staleness/min", "staleness/max"):
            assert run.series(extreme) == [0] + [settled] * 5
        assert run.versions == [(step, {max(0, step - 1 - settled)}) for step in range(1, 7)]


def test_the_queue_never_holds_more_than_one_batch(one_step_off_run: Trained) -> None:
    spans = timeline_spans(one_step_off_run.folder)
    generated = sorted(end for name, _, end in spans if name == "generate")
    taken = sorted(start for name, start, _ in spans if name == "train")
    assert len(generated) == len(taken) == 6
    staleness_by_step = [
        count + 1 - sum(start < end for start in taken) for count, end in enumerate(generated)
    ]
    assert max(staleness_by_step) == 1


def test_one_step_off_overlaps_and_waits_for_nothing_in_its_last_step(
    one_step_off_run: Trained,
) -> None:
    spans = timeline_spans(one_step_off_run.folder)
    training = [(start, end) for name, start, end in spans if name == "train"]
    generating = [(start, end) for name, start, end in spans if name == "generate"]
    assert (
        sum(
            start < g_end and g_start < end
            for start, end in training
            for g_start, g_end in generating
        )
        >= 4
    )
    assert "time/wait_generation_s" not in one_step_off_run.metrics[-1]


def test_the_trace_is_one_that_viewers_read_and_every_lane_adds_up_to_the_runs_time(
    whole_run: Trained,
) -> None:
    lanes = chrome_trace.check(whole_run.folder / "timeline.json")
    assert {name for _, name in lanes} == {"trainer", "rollout"}
    status = read_status(whole_run.folder)
    whole = pytest.approx(status.ended - status.began, rel=0.01)
    for lane in lanes.values():
        assert chrome_trace.covered(lane) / 1e6 == whole
    if perfetto.THERE:
        assert dict.fromkeys(lanes, whole) == perfetto.lanes(whole_run.folder / "timeline.json")


def test_the_first_step_is_the_same_in_both_plans(
    sync_run: Trained, one_step_off_run: Trained
) -> None:
    first, other = sync_run.metrics[0], one_step_off_run.metrics[0]
    for name in ("policy/loss", "policy/grad_norm", "policy/tokens", "reward/mean", "reward/std"):
        assert first[name] == other[name]


def test_the_run_folder_is_complete(whole_run: Trained) -> None:
    folder = whole_run.folder
    config = load_config(["--config", str(folder / "config.yaml")])
    assert dump_config(config) == (folder / "config.yaml").read_text()
    assert config.trainer.train_batch_size == 8
    assert [step for step, _ in whole_run.prompts] == [1, 2, 3, 4, 5, 6]
    assert all(len(set(prompts)) == 8 for _, prompts in whole_run.prompts)
    assert {name for name, _, _ in timeline_spans(folder)} >= {
        "generate",
        "train",
        "update",
        "sync",
    }
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.matrix
@pytest.mark.parametrize("plan", ["sync", "one_step_off"])
def test_an_untied_model_takes_several_optimizer_steps_per_batch(
    plan: str, train: Train, models: dict[str, str]
) -> None:
    run = train(
        f"trainer.plan={plan}", "trainer.max_training_steps=2", f"trainer.policy.model.path={models['untied']}",
        "trainer.policy_mini_batch_size=4", "trainer.update_epochs_per_batch=2",
        "trainer.policy.optimizer_config.num_warmup_steps=8",
    )  # fmt: skip
    assert max(run.series("sync/logprob_gap")) <= GAP
    # Two passes over two mini-batches: the rate logged is the mean over the step's four updates of the warm-up.
    assert run.series("policy/lr") == pytest.approx([2.5e-3 / 8, 6.5e-3 / 8])
    assert all(ratio != 1 for ratio in run.series("policy/ratio"))


def timeline_spans(folder: Path) -> list[tuple[str, float, float]]:
    """Name, start and end of each span, as any JSON reader sees them."""
    events: list[dict[str, Any]] = json.loads((folder / "timeline.json").read_text())
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"]
