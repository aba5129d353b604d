"""If the fork server ends, the tests end, with its reason."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest

from tests import warm


def test_when_it_ends_the_tests_are_interrupted_and_nothing_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    script = tmp_path / "dies.py"
    script.write_text("raise ModuleNotFoundError('No module named uvloop')")
    failures: list[str] = []
    monkeypatch.setattr(warm, "FAILURES", failures)
    monkeypatch.setattr(warm, "SCRIPT", script)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which xdist's workers ignore
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    began = time.monotonic()
    ran = None
    with pytest.raises(KeyboardInterrupt), warm.nursery() as door:
        try:
            time.sleep(60)
        finally:
            ran = subprocess.run([warm.program(door), "-c", "pass"], capture_output=True, text=True)
    assert ran is not None and ran.returncode != 0
    assert time.monotonic() - began < 30
    (reason,) = failures
    assert "has ended with status 1" in reason and reason.endswith("ModuleNotFoundError: No module named uvloop")


def test_elsewhere_than_on_linux_processes_start_as_ever() -> None:
    with mock.patch.object(warm, "ON_LINUX", False), warm.nursery() as door:
        ran = subprocess.run([warm.program(door), "-c", "print(7)"], capture_output=True, text=True, check=True)
    assert ran.stdout == "7\n"
