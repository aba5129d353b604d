"""Real engines join a run and leave it on Ray, while the run generates and syncs."""

from __future__ import annotations

from functools import partial

import pytest

from skyasync.inference.elastic import FILE
from skyasync.observability.jsonl import read_rows
from skyasync.trainer.extensions.prompt_ledger import audit
from tests.end_to_end import leftovers
from tests.end_to_end.runs import Train, read_lines
from tests.faults.engine_list_changes import SEEN, ChangingEngines

pytestmark = [pytest.mark.slow, pytest.mark.fault]

CHANGES = {1: ["0", "1"], 5: ["1"]}
STEPS = 10  # four steps after a change: the batches of two are in flight when the list changes


@pytest.mark.parametrize("plan", ["sync", "one_step_off", "streamed", "fully_async"])
def test_engines_come_and_go_and_every_prompt_is_trained_once(plan: str, train: Train) -> None:
    run = train(
        f"trainer.plan={plan}", f"trainer.max_training_steps={STEPS}", "generator.heartbeat_s=0.2",
        experiment=partial(ChangingEngines, changes=CHANGES),  # type: ignore[arg-type]
    )  # fmt: skip
    rows = {row["step"]: row for row in read_rows(run.folder / SEEN)}
    assert rows[1]["healthy"] == 1
    assert (rows[5]["healthy"], rows[5]["processes"]) == (2, 2), "the second has joined"
    assert (rows[STEPS]["healthy"], rows[STEPS]["processes"]) == (1, 1), (
        "the first has left, and its process ended"
    )
    assert rows[5]["listening"] >= 4 and rows[5]["beyond_loopback"] == [], (
        "no other machine can reach any process"
    )
    last = run.metrics[-1]
    assert (last["engines/joined"], last["engines/left"], last["engines/alive"]) == (1, 1, 1)
    assert "engines/deaths" not in last
    assert run.series("step") == list(range(1, STEPS + 1))
    assert max(run.series("sync/logprob_gap")) < 1e-4, (
        "engines that joined compute with the trainer's weights"
    )
    trained = audit(read_lines(run.folder / "ledger.jsonl"))
    assert {len(entries) for entries in trained.values()} == {1}
    assert not (run.folder / FILE).exists()
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
