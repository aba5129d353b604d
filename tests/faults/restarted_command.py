"""One command, started again each time that it was killed, and the processes and files that each start left.

Invariant: a command with a Ray cluster of its own is started again at once, while the former processes still end. A
command that has joined a cluster is started again when no former process is left in it.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from skyasync.observability.jsonl import read_rows
from skyasync.trainer.extensions.prompt_ledger import audit
from skyasync.trainer.plans import PLANS
from tests import fork_server
from tests.chaos.audit import unlike, wrong_prompts, wrong_steps
from tests.chaos.leaks import temporary_files
from tests.end_to_end import leftovers
from tests.end_to_end.parts import DATASET_SIZE
from tests.end_to_end.runs import Train, Trained, arguments, outside_environment, read_lines
from tests.faults.kill_points import DONE, DRIVER, FULL, draw_points

BATCH, GONE_S, LIMIT_S = 8, 30.0, 300.0
SETTINGS = (
    "trainer.ckpt_interval=1",
    "trainer.ckpt_keep=2",
    "trainer.max_restarts=99",
    "environment.num_workers=1",
    "generator.sampling_params.seed=3",
)
COMPARED_METRICS = ("policy/loss", "policy/grad_norm", "policy/tokens", "reward/mean")
PROGRAM = """
from skyasync import main
from tests.faults.kill_points import KillsExperiment

class Mine(KillsExperiment):
    def __init__(self, cfg):
        super().__init__(cfg, POINTS)

if __name__ == "__main__":
    main(Mine)
"""


def settings_of_plan(plan: str) -> list[str]:
    """The sum of ``streamed`` must not depend on the clock."""
    return [
        f"trainer.plan={plan}",
        *SETTINGS,
        *(["trainer.stream_groups=2"] if plan == "streamed" else []),
    ]


class RestartedCommand:
    """Args: program: with its arguments. folder: for its output. joins: it trains on this process's cluster."""

    def __init__(self, program: Sequence[str | Path], folder: Path, *, joins: bool) -> None:
        self._program, self._output, self._joins = program, folder / "output", joins
        self._looks, self._left = ThreadPoolExecutor(2), list[Future[list[str]]]()
        self.started = 0

    def to_the_end(self, most: int) -> None:
        while not self._start():
            assert self.started < most, self._output.read_text()

    def _start(self) -> bool:
        """Whether the command finished."""
        mark, scratch = f"skyasync-test-{uuid.uuid4().hex}", Path(tempfile.mkdtemp(prefix="death"))
        folders = {"TMPDIR": str(scratch), "RAY_TMPDIR": str(scratch), "MARK": mark}
        self.started += 1
        with self._output.open("a") as terminal:
            status = subprocess.run(
                self._program, env={**outside_environment(), **folders},
                stdout=terminal, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
            ).returncode  # fmt: skip
        look = self._looks.submit(left_of, mark, scratch, joined=self._joins)
        self._left.append(look)
        assert status in (0, -9), self._output.read_text()
        if self._joins:
            look.result()
        return status == 0

    @property
    def left(self) -> list[str]:
        """What is left ``GONE_S`` after the end of any start."""
        return [what for look in self._left for what in look.result()]


def left_of(mark: str, scratch: Path, *, joined: bool) -> list[str]:
    deadline = time.monotonic() + GONE_S
    while (found := _remaining(mark, joined=joined)) and time.monotonic() < deadline:
        time.sleep(0.3)
    found += temporary_files(scratch)
    shutil.rmtree(scratch)
    return found


def _remaining(mark: str, *, joined: bool) -> list[str]:
    return leftovers.of_processes(mark) + (leftovers.of_the_cluster() if joined else [])


def run_with_twenty_kills(
    plan: str, folder: Path, fork_socket: Path, model: str, address: str
) -> tuple[Trained, list[str]]:
    """A run whose controller and program are killed at ten points each, and its settings.

    Args:
        address: of this process's cluster, or "" for one of the run's own.
    """
    run, points, program = Trained(folder / "run"), draw_points(plan), folder / "program.py"
    steps = sum(point.after + 1 for point in points) + 2
    settings = [*settings_of_plan(plan), f"trainer.max_training_steps={steps}"]
    program.write_text(PROGRAM.replace("POINTS", repr(list(map(tuple, points)))))
    joining = [f"ray.address={address}"] if address else []
    given = arguments(*settings, *joining, runs=folder, model=model)
    command = RestartedCommand(
        [fork_server.program(fork_socket), program, *given], folder, joins=address != ""
    )
    drivers = sum(point.whom == DRIVER for point in points)
    command.to_the_end(most=1 + drivers)
    done = read_rows(run.folder / DONE)
    reached = [(row["whom"], row["moment"]) for row in done]
    assert reached == [point[:2] for point in points], f"only these were reached: {reached}"
    full = [row["finished"] for row in done if row["moment"] in FULL]
    assert len(full) == 4 and (min(full) >= BATCH or not PLANS.find(plan).asynchronous), (
        "the buffer was full"
    )
    assert command.started == 1 + drivers
    check(run, steps)
    assert command.left == []
    return run, settings


def check(run: Trained, steps: int) -> None:
    """No step is missing or doubled, and every prompt has ended once."""
    ledger, numbers = read_lines(run.folder / "ledger.jsonl"), run.series("step")
    assert wrong_steps(numbers) + wrong_prompts(ledger) + unlike(ledger, numbers) == []
    assert max(numbers) == steps
    ended = audit(ledger)
    whole = (
        steps * BATCH // DATASET_SIZE - 2
    )  # some prompts of later epochs may have been trained before others
    assert {
        f"e{epoch}-i{row}" for epoch in range(whole) for row in range(DATASET_SIZE)
    } <= ended.keys()
    assert len(ended) == steps * BATCH


def check_same_as_undisturbed(run: Trained, settings: Sequence[str], train: Train) -> None:
    """The metrics are bitwise identical to those of a run with these settings that is not killed."""
    whole = train(*settings, "trainer.run_name=whole")
    for name in COMPARED_METRICS:
        assert run.series(name) == whole.series(name), name
