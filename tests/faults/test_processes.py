"""Workers, an environment process, the controller and the program fail in turn: the run resumes from checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

from skyasync.observability.jsonl import read_rows
from skyasync.trainer.extensions.prompt_ledger import audit
from skyasync.trainer.plans import PLANS
from tests import fork_server
from tests.end_to_end import leftovers
from tests.end_to_end.runs import Train, Trained, arguments, outside_environment, read_lines
from tests.end_to_end.test_interrupt import wait_until
from tests.faults.process_failures import SEEN, Kills
from tests.faults.restarted_command import left_of

pytestmark = [pytest.mark.slow, pytest.mark.fault]

BATCH = 8
SETTINGS = (
    "trainer.ckpt_interval=2",
    "trainer.max_restarts=9",
    "trainer.heartbeat_timeout_s=5",  # for a machine that has other work as well
    "generator.heartbeat_s=0.2",
)
WORKER, HUNG, ENVIRONMENT, CONTROLLER = (
    "PolicyWorker",
    "stop PolicyWorker",
    "RpcActor",
    "Controller",
)
KILLS: dict[
    str, Kills
] = {  # in each run one worker is killed and one hangs; in the first one a controller hangs
    "sync": {3: WORKER, 4: ENVIRONMENT, 5: f"stop {CONTROLLER}", 6: f"{HUNG} in training"},
    "one_step_off": {3: HUNG, 4: ENVIRONMENT, 5: CONTROLLER, 6: f"{WORKER} in sync"},
    "streamed": {3: f"{WORKER} in training", 4: ENVIRONMENT, 5: CONTROLLER, 6: HUNG},
    "fully_async": {3: HUNG, 4: ENVIRONMENT, 5: CONTROLLER, 6: f"{WORKER} in training"},
    "shared devices": {3: WORKER, 4: ENVIRONMENT, 5: CONTROLLER},
}
CASES = {
    "sync": (),
    "one_step_off": (),
    "streamed": ("trainer.placement.policy_num_gpus_per_node=2",),  # one of two ranks each time
    "fully_async": (),
    "shared devices": ("trainer.placement.colocate_all=true",),
}
PROGRAM = """
from skyasync import main
from tests.faults.restarted_command import left_of
from tests.faults.process_failures import KilledProcesses

class Mine(KilledProcesses):
    def __init__(self, cfg):
        super().__init__(cfg, KILLS)

if __name__ == "__main__":
    main(Mine)
"""


@pytest.mark.parametrize("case", CASES)
def test_a_run_outlives_its_workers_and_its_controller_and_goes_on_by_the_same_command(
    case: str, train: Train, tmp_path: Path, models: dict[str, str], fork_socket: Path
) -> None:
    run, output, mark = (
        Trained(tmp_path / "run"),
        tmp_path / "output",
        f"skyasync-test-{uuid.uuid4().hex}",
    )
    kills, scratch = (
        KILLS[case],
        Path(tempfile.mkdtemp(prefix="kill")),
    )  # short: sockets' paths begin with it
    (tmp_path / "program.py").write_text(PROGRAM.replace("KILLS", repr(kills)))
    plan = case if case in PLANS else "sync"
    command = [
        f"trainer.plan={plan}",
        "trainer.placement.colocate_all=false",
        *CASES[case],
        *SETTINGS,
    ]
    given = arguments(*command, runs=tmp_path, model=models["tied"])
    folders = {"TMPDIR": str(scratch), "RAY_TMPDIR": str(scratch), "MARK": mark}
    with output.open("w") as terminal:
        program = subprocess.Popen(
            [fork_server.program(fork_socket), tmp_path / "program.py", *given],
            env={**outside_environment(), **folders}, stdout=terminal, stderr=subprocess.STDOUT,
        )  # fmt: skip
    end = max(kills) // 2 * 2 + 2
    try:
        wait_until(
            lambda: (run.folder / "checkpoints" / f"step_{end:06d}").exists(), program, output
        )
    finally:
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
    assert left_of(mark, scratch, joined=False) == []

    what = [row["what"] for row in read_rows(run.folder / "restarts.jsonl")]
    assert what[:1] == ["a process of the policy"]
    assert what.count("a process of the policy") == sum(
        WORKER in name for name in kills.values()
    ), what
    assert what.count("the controller") == sum(CONTROLLER in name for name in kills.values())
    silent = "the controller has not answered for" in output.read_text()
    assert silent == (f"stop {CONTROLLER}" in kills.values())
    assert {path.name for path in run.folder.glob("killed-*")} == {
        f"killed-{n}-{s}" for s, n in kills.items()
    }
    assert not (run.folder / "error.txt").exists()
    at_three, next_one = [row["engines"] for row in read_rows(run.folder / SEEN)][2:4]
    assert at_three == next_one, "engines stay while workers are restarted"

    saved = max(
        int(folder.name.removeprefix("step_"))
        for folder in run.folder.glob("checkpoints/step_??????")
    )
    again = train(*command, f"trainer.max_training_steps={saved + 2}")
    assert again.folder == run.folder
    assert run.series("step") == list(range(1, saved + 3)), "no step is missing or doubled"
    trained = audit(read_lines(run.folder / "ledger.jsonl"))
    assert len(trained) == (saved + 2) * BATCH
    assert {len(entries) for entries in trained.values()} == {1}, "each prompt is trained once"
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
