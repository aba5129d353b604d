"""Memory and disk are read in the background, logged with the steps, and warned of in time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from skyasync.run import resource_monitor
from skyasync.run.resource_monitor import ResourceMonitor

MIB = 1 << 20


def a_watch(tmp_path: Path, **options: Any) -> ResourceMonitor:
    options = {"processes": dict, "interval_s": 0.01} | options
    return ResourceMonitor(tmp_path, tmp_path / "checkpoints", **options)


def until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_process_is_counted_with_what_it_has_started() -> None:
    code = "import subprocess, sys; b = bytearray(64 << 20); print(1, flush=True); sys.stdin.read()"
    shell = f"{sys.executable} -c '{code}'; true"
    with subprocess.Popen(
        ["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        parent.stdout.readline()
        every = resource_monitor.with_descendants([parent.pid])
        assert len(every) == 2
        alone, together = (
            resource_monitor.own_bytes(parent.pid),
            sum(map(resource_monitor.own_bytes, every)),
        )
        assert alone < 16 * MIB < 64 * MIB < together < 128 * MIB
        parent.stdin.close()
    assert resource_monitor.own_bytes(parent.pid) == 0  # gone


def test_the_object_store_is_that_of_the_raylet_that_ray_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import mmap, sys; m = mmap.mmap(-1, 16 << 20); m.write(b'x' * len(m)); print(1, flush=1); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as raylet:
        assert raylet.stdout is not None and raylet.stdin is not None
        raylet.stdout.readline()
        monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
        assert a_watch(tmp_path).read()["memory/object_store_gib"] == pytest.approx(
            16 / 1024, rel=0.1
        )
        raylet.stdin.close()


def test_a_containers_limit_counts_where_it_is_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100000 kB\nMemAvailable: 50000 kB\n")
    monkeypatch.setattr(resource_monitor, "PROC", tmp_path)
    monkeypatch.setattr(resource_monitor, "CGROUP", tmp_path)
    assert resource_monitor.free_memory() == 50_000 << 10
    (tmp_path / "memory.current").write_text("9000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert resource_monitor.free_memory() == 50_000 << 10
    (tmp_path / "memory.max").write_text("10000000\n")
    assert resource_monitor.free_memory() == 2_000_000


def test_steps_take_the_newest_reading_and_wait_for_none(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_bytes(b"x" * 2 * MIB)
    held = threading.Event()

    def slow() -> dict[str, list[int]]:
        held.wait()
        return {"engines": [os.getpid()]}

    watch, metrics = a_watch(tmp_path, processes=slow), dict[str, float]()
    watch.on_start(None)  # type: ignore[arg-type]
    watch.on_step_end(None, metrics)  # type: ignore[arg-type]
    assert metrics == {}
    held.set()
    until(lambda: watch._newest)
    watch.on_step_end(None, metrics)  # type: ignore[arg-type]
    watch.close()
    assert metrics["memory/engines_gib"] >= metrics["memory/controller_gib"] > 0.01
    assert metrics["disk/run_gib"] == pytest.approx(2 / 1024, rel=0.1)
    assert metrics["memory/free_gib"] > 0 and metrics["disk/free_gib"] > 0


def test_a_reading_that_fails_is_left_out(tmp_path: Path) -> None:
    calls: list[int] = []

    def fails() -> dict[str, list[int]]:
        calls.append(1)
        raise RuntimeError("Ray has ended")

    watch = a_watch(tmp_path, processes=fails)
    watch.on_start(None)  # type: ignore[arg-type]
    until(lambda: len(calls) > 2)
    watch.close()
    assert watch._newest == {}


def test_it_warns_once_before_a_checkpoint_no_longer_fits_and_again_after_space_was_freed_and_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = a_watch(tmp_path, copies=True)
    watch._warn(
        {"disk/free_gib": 0.0, "memory/free_gib": 0.0}
    )  # the size of a checkpoint is unknown yet
    folder = tmp_path / "checkpoints" / "step_000001"
    for samples in (1, 5):
        (tmp_path / "samples.jsonl").write_bytes(b"x" * samples * MIB)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_bytes(b"x" * 20 * MIB)
        watch._measure(folder)
    free = {
        "disk/free_gib": 26 / 1024,
        "memory/free_gib": 26 / 1024,
    }  # 21 for the checkpoint, and 4 of samples
    with caplog.at_level(logging.WARNING):
        watch._warn(free)
        assert caplog.messages == []
        for _ in range(2):
            watch._warn(free | {"disk/free_gib": 24 / 1024})
        watch._warn(free)
        watch._warn({"disk/free_gib": 1.0, "memory/free_gib": 0.01})
    disk, memory = caplog.messages
    assert disk.startswith(
        f"0.02 GiB of disk at {tmp_path / 'checkpoints'} are free, and the next checkpoint needs 0.02"
    )
    assert memory.startswith(
        "0.01 GiB of memory are free, and the next checkpoint needs 0.02 GiB: make room"
    )


def test_actors_are_counted_by_what_they_are(ray_session: None) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class PolicyWorker:
        def measured(self) -> tuple[int, dict[str, list[int]]]:
            return os.getpid(), resource_monitor.of_this_job()

    actor = PolicyWorker.remote()
    process, measured = ray.get(actor.measured.remote())
    assert process in measured["workers"]
    assert process in resource_monitor.of_this_job()["workers"]  # from the driver too
    ray.kill(actor)
