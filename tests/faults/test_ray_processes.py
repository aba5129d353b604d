"""Ray's own processes are killed during a run: the run ends with one line that names the process, or continues."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from skyasync.observability.jsonl import read_rows
from skyasync.observability.run_dir import FAILED, FINISHED, read_status
from tests.chaos.audit import wrong_prompts, wrong_steps
from tests.chaos.leaks import leftovers
from tests.chaos.process_tree import Process, family
from tests.end_to_end.runs import outside_environment

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(900)]

LIMIT_S = 120.0
SETTINGS = (
    "trainer.run_name=run", "trainer.train_batch_size=8", "trainer.eval_interval=0", "trainer.ckpt_interval=1",
    "trainer.eval_before_train=false", "trainer.terminal=lines", "generator.backend=transformers",
    "generator.n_samples_per_prompt=2", "environment.num_workers=1",
)  # fmt: skip
#: A part of the process's title; the line of the error; whether the run continues without the process.
RAYS = {
    "raylet": ("raylet/raylet", "Ray's raylet (process NUMBER) has ended with signal 9", False),
    "gcs": ("gcs/gcs_server", "Ray's GCS server (process NUMBER) has ended with signal 9", False),
    "dashboard agent": ("ray::DashboardAgent", "after its dashboard_agent", False),
    "runtime environments' agent": ("ray::RuntimeEnvAgent", "after its runtime_env_agent", False),
    "log monitor": ("log_monitor.py", "", True),
}


def start(runs: Path, scratch: Path, steps: int) -> subprocess.Popen[str]:
    folders = {"TMPDIR": str(scratch), "RAY_TMPDIR": str(scratch), "MARK": str(scratch)}
    settings = [*SETTINGS, f"trainer.runs_dir={runs}", f"trainer.max_training_steps={steps}"]
    return subprocess.Popen(
        [sys.executable, "-m", "skyasync", *settings], env=outside_environment() | folders,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def steps_of(run: Path) -> list[int]:
    return [int(row["step"]) for row in read_rows(run / "metrics.jsonl") if row["step"]]


def processes_named(program: int, title: str, limit_s: float = 60.0) -> Process:
    deadline = time.monotonic() + limit_s
    while not (processes := [each for each in family(program) if title in each.title]):
        assert time.monotonic() < deadline, title
        time.sleep(0.2)
    return processes[0]


@pytest.mark.parametrize("name", RAYS)
def test_a_run_whose_ray_has_lost_a_process_says_which_and_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    (title, line, goes_on), run = RAYS[name], tmp_path / "run"
    scratch = Path(tempfile.mkdtemp(prefix="ray"))
    program = start(tmp_path, scratch, 12 if goes_on else 10_000)
    try:
        while len(steps_of(run)) < 3:
            assert program.poll() is None, program.communicate()[0]
            time.sleep(0.2)
        known, killed = family(program.pid), processes_named(program.pid, title)
        killed.send(signal.SIGKILL)
        output, _ = program.communicate(timeout=LIMIT_S)
        errors = [text for text in output.splitlines() if text.startswith("error:")]
        if goes_on:
            assert (program.returncode, errors, read_status(run).state) == (0, [], FINISHED), output
        else:
            assert program.returncode == 1, output
            assert len(errors) == 1 and line.replace("NUMBER", str(killed.number)) in errors[0], (
                output
            )
            assert "is started again" not in output and "state-dump" not in output, output
            assert read_status(run).state == FAILED
            assert "RayEndedError: " in (run / "error.txt").read_text()
        assert leftovers(known, f"MARK={scratch}", scratch) == []
        if name == "raylet":
            done = max(steps_of(run))
            again = start(tmp_path, scratch, done + 2)
            assert again.wait(LIMIT_S) == 0 and max(steps_of(run)) == done + 2
            assert wrong_steps(steps_of(run)) + wrong_prompts(read_rows(run / "ledger.jsonl")) == []
            assert not (run / "error.txt").exists()
    finally:
        program.kill()
        shutil.rmtree(scratch, ignore_errors=True)
