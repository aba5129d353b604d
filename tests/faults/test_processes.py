"""A worker that is killed or hangs, an environment process, the controller and the program, one after the other: the
run goes on from its checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from skyasync.observe.jsonl import read_rows
from skyasync.state.ledger import audit
from tests import warm
from tests.end_to_end import leftovers
from tests.end_to_end.runs import Train, Trained, arguments, outside_environment, read_lines
from tests.end_to_end.test_interrupt import wait_until
from tests.faults.processes import SEEN, Kills

pytestmark = [pytest.mark.slow, pytest.mark.fault]

BATCH = 8
SETTINGS = (
    "trainer.ckpt_interval=2",
    "trainer.max_restarts=9",
    "trainer.heartbeat_timeout_s=5",  # of a machine that has other things to do as well
    "generator.heartbeat_s=0.2",
)
WORKER, HUNG, ENVIRONMENT = "PolicyWorker", "stop PolicyWorker", "_Host"
CONTROLLER, HUNG_CONTROLLER = "Controller", "stop Controller"
KILLS: dict[str, Kills] = {  # in turn, each plan something else
    "sync": {3: WORKER, 4: ENVIRONMENT, 5: CONTROLLER},
    "one_step_off": {3: HUNG, 4: ENVIRONMENT, 5: HUNG_CONTROLLER},
    "streamed": {3: WORKER, 4: ENVIRONMENT, 5: CONTROLLER},
    "fully_async": {3: HUNG, 4: ENVIRONMENT, 5: CONTROLLER},
}
PROGRAM = """
from skyasync import main
from tests.faults.processes import Killed

class Mine(Killed):
    def __init__(self, cfg):
        super().__init__(cfg, KILLS)

if __name__ == "__main__":
    main(Mine)
"""


@pytest.mark.parametrize(("plan", "shared"), [*((plan, "false") for plan in KILLS), ("sync", "true")])
def test_a_run_outlives_its_workers_and_its_controller_and_goes_on_by_the_same_command(
    plan: str, shared: str, train: Train, tmp_path: Path, models: dict[str, str], warm_processes: Path
) -> None:
    run, output, mark = Trained(tmp_path / "run"), tmp_path / "output", f"skyasync-test-{uuid.uuid4().hex}"
    (tmp_path / "program.py").write_text(PROGRAM.replace("KILLS", repr(KILLS[plan])))
    command = [f"trainer.plan={plan}", f"trainer.placement.colocate_all={shared}", *SETTINGS]
    given = arguments(*command, runs=tmp_path, model=models["tied"])
    with output.open("w") as terminal:
        program = subprocess.Popen(
            [warm.program(warm_processes), tmp_path / "program.py", *given],
            env={**outside_environment(), "MARK": mark}, stdout=terminal, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: (run.folder / "checkpoints" / "step_000006").exists(), program, output)
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
    assert leftovers.none_soon(lambda: leftovers.of_processes(mark), patience_s=30) == []

    what = [row["what"] for row in read_rows(run.folder / "restarts.jsonl")]
    assert what[:1] == ["a process of the policy"]
    assert "the controller" in what  # which may meet the third step again
    assert {path.name for path in run.folder.glob("killed-*")} == {f"killed-{n}-{s}" for s, n in KILLS[plan].items()}
    assert not (run.folder / "error.txt").exists()
    at_three, next_one = [row["engines"] for row in read_rows(run.folder / SEEN)][2:4]
    assert at_three == next_one, "engines live on while workers are started again"

    saved = max(int(folder.name.removeprefix("step_")) for folder in run.folder.glob("checkpoints/step_??????"))
    again = train(*command, f"trainer.max_training_steps={saved + 2}")
    assert again.folder == run.folder
    assert run.series("step") == list(range(1, saved + 3)), "no step is missing or there twice"
    trained = audit(read_lines(run.folder / "ledger.jsonl"))
    assert len(trained) == (saved + 2) * BATCH
    assert {len(entries) for entries in trained.values()} == {1}, "each prompt is trained once"
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
