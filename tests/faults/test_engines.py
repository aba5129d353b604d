"""Engines that are killed or hang during a run: the run finishes, and nothing is lost, doubled or left over."""

from __future__ import annotations

import json

import pytest

from skyasync.trainer.extensions.prompt_ledger import audit
from tests.end_to_end import leftovers
from tests.end_to_end.runs import Train, Trained, read_lines
from tests.faults.engine_failures import FOUND, FailingEngines, PlannedFailures

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.usefixtures("no_temporary_files")]

BATCH = 8
SETTINGS = (
    "generator.sampling_params.max_generate_length=24",
    "generator.heartbeat_s=0.05",
    "generator.heartbeat_timeout_s=4",  # for a machine that has other work as well
    "generator.max_engine_restarts=9",
)


def check(run: Trained, steps: int, planned: PlannedFailures, engines: int) -> None:
    assert [row["step"] for row in run.metrics] == list(range(1, steps + 1))
    trained = audit(read_lines(run.folder / "ledger.jsonl"))
    assert len(trained) == steps * BATCH
    assert {len(entries) for entries in trained.values()} == {1}, "each prompt is trained once"
    found = json.loads((run.folder / FOUND).read_text())
    assert found == {"versions": [steps] * engines, "unused": []}
    failures = max(row.get("engines/deaths", 0) for row in run.metrics)
    assert failures >= len(planned) - 1, "the last failure may be detected later"
    assert max(row.get("engines/recovery_s", 0) for row in run.metrics) > 0
    assert all(row["staleness/max"] <= 1 for row in run.metrics)
    assert "is replaced" in (run.folder / "timeline.json").read_text()
    assert leftovers.none_soon(leftovers.of_the_cluster) == []


@pytest.mark.parametrize("plan", ["sync", "one_step_off", "streamed", "fully_async"])
def test_a_run_survives_engines_that_are_killed_or_hang_in_a_rollout_a_sync_and_between(
    plan: str, train: Train
) -> None:
    planned: PlannedFailures = [
        (moment, how) for how in ("kill", "stop") for moment in ("rollout", "sync", "idle")
    ]
    steps = 36
    run = train(
        f"trainer.plan={plan}", f"trainer.max_training_steps={steps}", "generator.num_inference_engines=2", *SETTINGS,
        experiment=lambda cfg: FailingEngines(cfg, planned),
    )  # fmt: skip
    check(run, steps, planned, engines=2)


@pytest.mark.vllm
def test_a_run_survives_the_failure_of_its_only_engines_core(
    train: Train, engines_session: None
) -> None:
    planned: PlannedFailures = [("rollout", "kill core")]
    run = train(
        "trainer.plan=fully_async", "trainer.max_training_steps=12", "generator.backend=vllm", *SETTINGS,
        experiment=lambda cfg: FailingEngines(cfg, planned),
    )  # fmt: skip
    check(run, 12, planned, engines=1)
