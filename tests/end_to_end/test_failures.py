"""Any failure in any process: the run ends at once, names the error, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyasync import BasePPOExp
from skyasync.algorithms import POLICY_LOSSES
from tests.end_to_end import leftovers
from tests.end_to_end.broken import (
    EngineIsKilled,
    GeneratorBreaks,
    broken_loss,
    seconds_since_failure,
)
from tests.end_to_end.runs import Train

pytestmark = pytest.mark.slow

SECONDS = 15.0  # waiting for a lock, a queue or a timeout takes longer
BROKEN = "tests.end_to_end.broken"

#: part -> experiment, further settings, and what the error's text must have
FAILURES = {
    "generator": (GeneratorBreaks, [], ["PartIsBrokenError", 'broken.py", line', "in generate"]),
    "environment": (
        BasePPOExp,
        [f"environment.env_class={BROKEN}:BrokenEnvironment"],
        ["PartIsBrokenError", 'broken.py", line', "in step", "while playing the episode e0-i"],
    ),
    "policy worker": (
        BasePPOExp,
        ["trainer.algorithm.policy_loss_type=broken"],
        ["PartIsBrokenError", 'broken.py", line', "in broken_loss", "PolicyWorker"],
    ),
    "engine": (EngineIsKilled, ["generator.max_engine_restarts=0"], ["_EngineActor", "died"]),
}
QUICK = ["generator", "engine"]


@pytest.mark.parametrize("plan", ["sync", pytest.param("one_step_off", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "part",
    [part if part in QUICK else pytest.param(part, marks=pytest.mark.matrix) for part in FAILURES],
)
def test_a_failure_ends_the_run_with_its_traceback(
    part: str, plan: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICY_LOSSES, "broken", broken_loss)
    experiment, settings, texts = FAILURES[part]
    with pytest.raises(Exception) as failure:
        train(
            f"trainer.plan={plan}", "trainer.max_training_steps=9", *settings, experiment=experiment
        )
    assert seconds_since_failure(failure.value, tmp_path / "run") < SECONDS
    assert [text for text in texts if text not in str(failure.value)] == []
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
