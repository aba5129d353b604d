"""Perfetto's own trace processor, if ``TRACE_PROCESSOR`` names the folder of its WebAssembly build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("TRACE_PROCESSOR", "")
THERE = Path(FOLDER, "trace_processor.wasm").is_file() and shutil.which("node") is not None
LANES = """
    select process.pid, thread.name, sum(slice.dur) / 1e9 from slice
    join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
    where slice.depth = 0 group by utid order by process.pid, thread.tid
"""
COMPLAINTS = "select name, value from stats where severity != 'info' and value > 0"


def rows(trace: Path, sql: str) -> list[list[Any]]:
    driver = Path(__file__).with_name("trace_processor.mjs")
    done = subprocess.run(
        ["node", str(driver), FOLDER, str(trace), sql],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def lanes(trace: Path) -> dict[tuple[int, str], float]:
    """Seconds of the outermost spans by part of the run and lane; the processor reports no error."""
    assert rows(trace, COMPLAINTS) == []
    return {(part, name): seconds for part, name, seconds in rows(trace, LANES)}
