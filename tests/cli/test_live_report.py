"""``skyasync report --live``: the server for runs of another process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from skyasync.__main__ import command
from tests.observability.report.folders import make_run


@pytest.mark.matrix
@pytest.mark.slow
def test_it_serves_until_ctrl_c(tmp_path: Path) -> None:
    runs = [str(make_run(tmp_path / name)) for name in ("one", "two")]
    argv = [sys.executable, "-m", "skyasync", "report", *runs, "--live"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        printed = re.fullmatch(r"live page: (http://127\.0\.0\.1:\d+/)\n", server.stdout.readline())
        assert printed is not None
        with urllib.request.urlopen(printed[1], timeout=60) as answer:
            assert b"2 runs compared" in answer.read()
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--live", "--every", "5"],
            "--every has no effect with --live: the page is served, not written",
        ),
        (["--live", "--port", "many"], "--port many: "),
        (["--live", "--port", "99999999"], "--port 99999999: a port is a number up to 65535"),
        (["--port", "9100"], "--port needs --live"),
        (["--live", "--hots", "x"], "unknown option --hots: did you mean --host?"),
    ],
)
def test_wrong_arguments_are_one_line(
    argv: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(["report", str(make_run(tmp_path / "run", steps=1)), *argv])
    assert line in capsys.readouterr().err
