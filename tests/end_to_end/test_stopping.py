"""A callback that ``main`` is given ends a real run, and the same command resumes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skyasync import TrainerCallback, main
from skyasync.observability.run_dir import FINISHED, read_status
from tests.end_to_end.runs import Trained, arguments

pytestmark = pytest.mark.slow


class StopsAfterTwo(TrainerCallback):
    """Counts in all runs of a folder."""

    def __init__(self) -> None:
        self.steps = 0

    async def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.steps += 1
        metrics["my/steps"] = float(self.steps)
        if self.steps == 2:
            trainer.stop("two steps are enough")

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.matrix
def test_a_run_is_stopped_by_a_callback_and_resumed_by_the_same_command(
    ray_session: None, models: dict[str, str], tmp_path: Path
) -> None:
    command = arguments("trainer.plan=fully_async", "trainer.max_training_steps=4", "trainer.ckpt_interval=10",
                        runs=tmp_path, model=models["tied"])  # fmt: skip
    run = Trained(tmp_path / "run")
    main(argv=command, callbacks=[StopsAfterTwo()])
    assert run.series("step") == [1, 2]
    assert [path.name for path in (run.folder / "checkpoints").glob("step_*")] == ["step_000002"]
    status = read_status(run.folder)
    assert (status.state, status.reason) == (FINISHED, "step 2: two steps are enough")

    main(argv=command, callbacks=[StopsAfterTwo()])
    assert run.series("step") == [1, 2, 3, 4]
    assert run.series("my/steps") == [1.0, 2.0, 3.0, 4.0]
    assert read_status(run.folder).reason == ""
