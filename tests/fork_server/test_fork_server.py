"""If the fork server ends, the tests end, with its reason."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest

from tests import fork_server


def test_if_the_server_ends_the_tests_are_interrupted_and_no_process_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ModuleNotFoundError('No module named uvloop')")
    failures: list[str] = []
    monkeypatch.setattr(fork_server, "FAILURES", failures)
    monkeypatch.setattr(fork_server, "SCRIPT", script)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which xdist's workers ignore
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    began = time.monotonic()
    ran = None
    with pytest.raises(KeyboardInterrupt), fork_server.start_fork_server() as fork_socket:
        try:
            time.sleep(60)
        finally:
            ran = subprocess.run(
                [fork_server.program(fork_socket), "-c", "pass"], capture_output=True, text=True
            )
    assert ran is not None and ran.returncode != 0
    assert time.monotonic() - began < 30
    (reason,) = failures
    assert "has ended with status 1" in reason and reason.endswith(
        "ModuleNotFoundError: No module named uvloop"
    )


def test_on_other_systems_than_linux_processes_start_as_usual() -> None:
    with (
        mock.patch.object(fork_server, "ON_LINUX", False),
        fork_server.start_fork_server() as fork_socket,
    ):
        ran = subprocess.run(
            [fork_server.program(fork_socket), "-c", "print(7)"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert ran.stdout == "7\n"
