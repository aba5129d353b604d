"""A real run with its live page, read while it trains."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.end_to_end.runs import arguments, outside_environment, read_lines

pytestmark = pytest.mark.slow


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.matrix
def test_the_page_shows_the_run_while_it_trains(tmp_path: Path, models: dict[str, str]) -> None:
    output = tmp_path / "output"
    settings = arguments("trainer.plan=one_step_off", "trainer.max_training_steps=400", "trainer.live_page=true",
                         runs=tmp_path, model=models["tied"])  # fmt: skip
    with output.open("w") as terminal:
        run = subprocess.Popen([sys.executable, "-m", "skyasync", *settings], env=outside_environment(),
                               cwd=Path(__file__).parents[2], stdout=terminal, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 180
        while not metrics.exists() or len(read_lines(metrics)) < 3:
            assert run.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        printed = re.search(
            r"^live page: (http://127\.0\.0\.1:\d+/)$", output.read_text(), flags=re.MULTILINE
        )
        assert printed is not None, output.read_text()
        page, series = read(printed[1]), read(f"{printed[1]}metrics")
        assert run.poll() is None, output.read_text()
        assert 'class="badge running"' in page and "Reward and score" in page
        assert re.search(r'^skyasync_step\{run="run"\} \d', series, flags=re.MULTILINE)
        assert 'skyasync_running{run="run"} 1.0' in series
    finally:
        run.terminate()
        run.wait(60)
    with pytest.raises(OSError):
        read(printed[1])
