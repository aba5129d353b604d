"""Ctrl-C in the terminal: the run ends cleanly, keeps its progress, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from skyasync.observability.run_dir import read_status
from tests import fork_server
from tests.end_to_end import leftovers
from tests.end_to_end.runs import Train, Trained, arguments, outside_environment

pytestmark = pytest.mark.slow

STARTS = ("starting", "loading models")  # one of which may be over before it is shown
STATUS = 130  # the exit status in shells of a program that Ctrl-C ended


@pytest.fixture
def skyasync(fork_socket: Path) -> list[str]:
    return [fork_server.program(fork_socket), "-m", "skyasync"]


STREAMED = ("trainer.plan=fully_async", "trainer.max_staleness=2", "trainer.ckpt_on_exit=true")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "moment", [pytest.param("while it starts", marks=pytest.mark.fault), "after three steps"]
)
def test_ctrl_c_ends_a_run_cleanly_and_leaves_what_it_has_trained(
    moment: str, skyasync: list[str], train: Train, tmp_path: Path, models: dict[str, str]
) -> None:
    run, output, mark = (
        Trained(tmp_path / "run"),
        tmp_path / "output",
        f"skyasync-test-{uuid.uuid4().hex}",
    )
    with output.open("w") as terminal:
        program = subprocess.Popen(
            [*skyasync, *arguments(*STREAMED, runs=tmp_path, model=models["tied"])],
            env={**outside_environment(), "MARK": mark}, cwd=Path(__file__).parents[2],
            stdout=terminal, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=hears_ctrl_c,
        )  # fmt: skip
    try:
        if moment == "while it starts":
            wait_until(
                lambda: any(phase in output.read_text() for phase in STARTS), program, output
            )
        else:
            metrics = run.folder / "metrics.jsonl"
            wait_until(
                lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, program, output
            )
        os.killpg(
            program.pid, signal.SIGINT
        )  # as from a terminal: to all processes in the foreground
        assert program.wait(timeout=30) == STATUS, output.read_text()
    finally:
        program.kill()
    assert "Traceback" not in output.read_text()
    assert output.read_text().rstrip().endswith("stopped")
    if moment == "after three steps":
        steps = run.series("step")
        assert steps == list(range(1, len(steps) + 1))
        assert (run.folder / "reward.png").exists()
    assert leftovers.none_soon(lambda: leftovers.of_processes(mark)) == []
    if moment == "after three steps":
        saved = [
            int(folder.name.removeprefix("step_"))
            for folder in run.folder.glob("checkpoints/step_*")
        ]
        goes_on_from(saved[-1], train)


@pytest.mark.parametrize(
    ("subcommand", "process"), [("train", "gcs_server"), ("rollout", "raylet/raylet")]
)
def test_ctrl_c_while_ray_starts_is_one_line(
    subcommand: str, process: str, skyasync: list[str], tmp_path: Path, models: dict[str, str]
) -> None:
    output, mark = tmp_path / "output", f"skyasync-test-{uuid.uuid4().hex}"
    held_out = "data.val_data=tests.end_to_end.parts:train_prompts"
    with output.open("w") as terminal:
        program = subprocess.Popen(
            [*skyasync, subcommand, *arguments(held_out, runs=tmp_path, model=models["tied"])],
            env={**outside_environment(), "MARK": mark}, cwd=Path(__file__).parents[2],
            stdout=terminal, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=hears_ctrl_c,
        )  # fmt: skip
    try:
        wait_until(
            lambda: any(process in line for line in leftovers.of_processes(mark)), program, output
        )
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(timeout=30) in (STATUS, -signal.SIGINT), (
            output.read_text()
        )  # which is the same in a shell
    finally:
        program.kill()
    assert output.read_text().splitlines() == ["stopped"]
    assert leftovers.none_soon(lambda: leftovers.of_processes(mark)) == []


IN_TIME, LATE = 30.0, 0.001  # seconds in which a run has to save
STOPPED = [
    pytest.param("fully_async", IN_TIME, id="fully_async"),
    pytest.param("one_step_off", IN_TIME, id="one_step_off"),
    pytest.param("streamed", LATE, id="too late"),
]


@pytest.mark.fault
@pytest.mark.parametrize(("plan", "grace_s"), STOPPED)
def test_sigterm_to_all_of_a_runs_processes_saves_what_it_has_trained(
    plan: str,
    grace_s: float,
    skyasync: list[str],
    train: Train,
    tmp_path: Path,
    models: dict[str, str],
) -> None:
    """As schedulers end a job. ``ckpt_on_exit`` is not set: it is enough that the run keeps checkpoints."""
    run, output, mark = (
        Trained(tmp_path / "run"),
        tmp_path / "output",
        f"skyasync-test-{uuid.uuid4().hex}",
    )
    late = grace_s == LATE
    keeps = [
        f"trainer.plan={plan}",
        f"trainer.ckpt_interval={2 if late else 1000}",
        "trainer.ckpt_keep=1",
    ]
    with output.open("w") as terminal:
        program = subprocess.Popen(
            [*skyasync, *arguments(*keeps, f"trainer.sigterm_grace_s={grace_s}", runs=tmp_path, model=models["tied"])],
            env={**outside_environment(), "MARK": mark}, cwd=Path(__file__).parents[2],
            stdout=terminal, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        metrics = run.folder / "metrics.jsonl"
        wait_until(
            lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, program, output
        )
        os.killpg(program.pid, signal.SIGTERM)
        assert program.wait(timeout=40) == 143, output.read_text()
    finally:
        program.kill()
    lines = output.read_text().rstrip().splitlines()
    step = max(
        int(folder.name.removeprefix("step_"))
        for folder in run.folder.glob("checkpoints/step_??????")
    )
    newest = f"the newest checkpoint is of step {step}, resume with trainer.resume_mode=latest"
    too_late = f"the run was not saved, it took more than {LATE:g} s (trainer.sigterm_grace_s)"
    assert lines[-1] == f"terminated by SIGTERM: {too_late if late else newest}"
    assert "Traceback" not in output.read_text() and "raylet" not in output.read_text()
    assert leftovers.none_soon(lambda: leftovers.of_processes(mark)) == []
    goes_on_from(step, train, keeps[0], least=2 if late else 3)


def hears_ctrl_c() -> None:
    """As in a terminal, even if the tests run in the background of a shell, whose programs ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def goes_on_from(step: int, train: Train, plan: str = STREAMED[0], least: int = 3) -> None:
    """Two more steps: every prompt of the run is trained once, including those that were in flight."""
    run = train(plan, "trainer.resume_mode=latest", f"trainer.max_training_steps={step + 2}")
    assert step >= least
    assert run.series("step") == list(range(1, step + 3))
    trained = [prompt for _, prompts in run.prompts for prompt in prompts]
    assert len(set(trained)) == len(trained) == 8 * (step + 2)


def wait_until(reached: Callable[[], bool], program: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + 180
    while not reached():
        assert program.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


BEFORE_IT_LISTENS = """
import signal
from skyasync.run import launch as program, ray_cluster
PLACE = lambda *parts: signal.raise_signal(signal.SIGTERM)
from skyasync.cli.train import main
main()
"""


@pytest.mark.fault
@pytest.mark.parametrize("place", ["ray_cluster.bring_to", "program.run_in_controller"])
def test_sigterm_between_rays_start_and_the_controllers_is_told_as_at_any_other_time(
    place: str, tmp_path: Path, models: dict[str, str]
) -> None:
    """At that time Ray has its own handlers."""
    command = [sys.executable, "-c", BEFORE_IT_LISTENS.replace("PLACE", place)]
    program = subprocess.run(
        [*command, *arguments(STREAMED[0], runs=tmp_path, model=models["tied"])],
        env=outside_environment(), cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (program.returncode, program.stderr.splitlines()[-1:]) == (
        143,
        ["terminated by SIGTERM"],
    ), program.stderr
    if place == "program.run_in_controller":
        assert read_status(tmp_path / "run").state == "stopped"
        assert "SIGTERM received" not in program.stderr
