"""The live view on a real terminal: the user's view while it runs, and the terminal afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observability.screen import ROOT, InTerminal, Screen

pytestmark = pytest.mark.slow

#: A driver: it polls, and meanwhile other code writes to its terminal in every way there is.
DRIVER = """
import logging, os, subprocess, sys, time
from pathlib import Path
old = logging.StreamHandler()  # holds the stream of before
from skyasync.observability.progress import ProgressRecorder
from skyasync.observability.terminal import ProgressView
folder, end = Path(sys.argv[1]), sys.argv[2]
print("before")
recorder = ProgressRecorder(5)
recorder.phase("training")
with ProgressView(folder=folder) as view:
    for step in range(1, 6):
        recorder.log({"reward/mean": step / 10, "time/step_s": 1.0, "idle/trainer": 0.6, "idle/engines": 0.1}, step)
        if step == 2:
            recorder.log({"eval/score": 0.75}, 2)
        print(f"printed {step}")
        os.write(2, b"from C %d\\n" % step)
        old.stream.write(f"logged {step}\\n")
        subprocess.run(["sh", "-c", f"echo child {step}; echo child error {step} >&2"])
        view.say([f"said {step} \\x1b[31mred\\x1b[0m", "x" * 100], step % 2 == 0)
        print("half", end="")
        sys.stdout.flush()
        print(" a line", step)
        view.update(recorder.report(view.seen))
        if end == "wait" and step == 4:
            print("waiting")
            view.update(recorder.report(view.seen))
            while not (folder / "go").exists():
                time.sleep(0.02)
                view.update(recorder.report(view.seen))
        if end == "kill" and step == 3:
            os.kill(os.getpid(), 9)
        if end == "raise" and step == 3:
            print("torn", end="")
            raise ValueError("as it was raised")
print("behind")
"""
WRITTEN = (
    "printed {}",
    "from C {}",
    "logged {}",
    "child {}",
    "child error {}",
    "said {} red",
    "half a line {}",
)


def everything(screen: Screen, steps: range) -> None:
    for step in steps:
        for text in WRITTEN:
            assert screen.shown.count(text.format(step)) == 1, (text, step, screen.shown)


def panels(screen: Screen) -> list[str]:
    return [
        line for line in screen.shown if line.startswith(("step ", "reward ", "waits ", "speed "))
    ]


@pytest.mark.matrix
def test_other_output_stays_complete_above_the_panel_and_after_it(tmp_path: Path) -> None:
    terminal = InTerminal(DRIVER, str(tmp_path), "end", width=60)
    assert terminal.ended() == 0
    screen = terminal.screen
    everything(screen, range(1, 6))
    assert "x" * 60 in screen.shown  # nothing is cut: the terminal wraps it
    assert screen.shown[0] == "before"
    assert (
        "".join(screen.shown[-3:])
        == "step 5/5  reward 0.50  eval 0.75  idle trainer 60% engines 10%  1.0 s/stepbehind"
    )
    assert [
        line for line in panels(screen) if line.startswith(("reward ", "waits "))
    ] == []  # the panel is gone
    assert screen.modes == []  # the cursor was never hidden, no screen was switched


def test_the_panel_is_below_what_is_written_and_follows_the_terminals_size(tmp_path: Path) -> None:
    terminal = InTerminal(DRIVER, str(tmp_path), "wait", width=80)
    screen = terminal.until(
        lambda s: "waiting" in s.shown and any("bottleneck" in line for line in s.shown[-4:])
    )
    below = screen.shown[screen.shown.index("waiting") + 1 :]
    assert below[0].startswith("step 4/5 ━") and below[-1].startswith(
        "waits   trainer 60%, engines 10% idle; gen"
    )
    terminal.resize(30, 4)
    screen = terminal.until(lambda s: s.shown[-1].startswith("waits") and len(s.shown[-1]) <= 29)
    assert screen.shown[-1].endswith("…")
    (tmp_path / "go").touch()
    assert terminal.ended() == 0
    everything(terminal.screen, range(1, 6))


def test_ctrl_c_and_errors_leave_the_terminal_and_their_traceback_whole(tmp_path: Path) -> None:
    terminal = InTerminal(DRIVER, str(tmp_path), "wait")
    terminal.until(lambda s: "waiting" in s.shown)
    terminal.type("\x03")
    assert terminal.ended() == 130
    assert any(line.startswith("step 4/5  reward 0.40") for line in terminal.screen.shown)
    assert terminal.screen.shown[-1] == "KeyboardInterrupt"
    terminal = InTerminal(DRIVER, str(tmp_path / "2"), "raise")
    assert terminal.ended() == 1
    shown = terminal.screen.shown
    everything(terminal.screen, range(1, 4))
    assert "torn" in shown and shown[-1] == "ValueError: as it was raised"
    assert shown.index("torn") < shown.index("Traceback (most recent call last):")


def test_a_killed_driver_leaves_no_terminal_mode_and_its_output_in_its_file(tmp_path: Path) -> None:
    terminal = InTerminal(DRIVER, str(tmp_path), "kill")
    assert terminal.ended() == 128 + signal.SIGKILL
    assert terminal.screen.modes == []
    assert "from C 3" in (tmp_path / "driver.log").read_text()


def test_a_terminal_that_is_gone_costs_the_panel_and_not_the_run(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + DRIVER
    terminal = InTerminal(
        code.replace('print("behind")', "(folder / 'done').touch()"), str(tmp_path), "wait"
    )
    terminal.until(lambda s: "waiting" in s.shown)
    terminal.hang_up()
    (tmp_path / "go").touch()
    terminal.reap()
    assert (tmp_path / "done").exists()


@pytest.mark.matrix
def test_live_is_drawn_into_a_pipe_too_and_lines_on_a_terminal(tmp_path: Path) -> None:
    live = DRIVER.replace("ProgressView(folder", "ProgressView(mode='live', folder")
    ran = subprocess.run(
        [sys.executable, "-c", live, str(tmp_path), "end"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "70", "LINES": "20"},
    )  # fmt: skip
    screen = Screen(70, 20)
    screen.feed(ran.stdout)
    assert screen.shown[0] == "before" and screen.shown[-1] == "behind"
    assert screen.shown.count("printed 3") == screen.shown.count("child 3") == 1
    lines = DRIVER.replace("ProgressView(folder", "ProgressView(mode='lines', folder")
    terminal = InTerminal(lines, str(tmp_path), "end", width=100)
    assert terminal.ended() == 0
    assert [
        line.partition("  ")[0] for line in terminal.screen.shown if line.startswith("step")
    ] == [f"step {step}/5" for step in range(1, 6)]


def test_a_run_folder_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    terminal = InTerminal(DRIVER, str(tmp_path / "file"), "end")
    assert terminal.ended() == 0
    assert terminal.screen.shown[-1] == "behind"
