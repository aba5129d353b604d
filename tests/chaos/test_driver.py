"""The driver of a program: which processes it signals, and that it starts the same command again.

The program is a substitute for a run: it has processes with a run's titles, and writes a step at intervals.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from skyasync.observability.jsonl import read_rows
from tests.chaos.audit import wrong_steps
from tests.chaos.channel import VARIABLE, Order, Orders
from tests.chaos.driver import Command, FaultDriver
from tests.chaos.events import Event
from tests.chaos.fault_hooks import flip_bit
from tests.chaos.leaks import clean_up, leftovers, temporary_files

STEPS = 24
RUN = f"""
import json, os, subprocess, sys, time
folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)
with open(folder + "/status.json", "w") as file:
    json.dump({{"state": "running", "pid": os.getpid()}}, file)
names = ["ray::Controller.run", "ray::PolicyWorker.call"]
wait = f"tail -s 0.1 --pid={{os.getpid()}} -f /dev/null"  # ends with this program, as a run's processes do
parts = [subprocess.Popen(["bash", "-c", f"exec -a {{name}} {{wait}}"]) for name in names]
path = folder + "/metrics.jsonl"
done = len(open(path).readlines()) if os.path.exists(path) else 0
for step in range(done + 1, {STEPS} + 1):
    time.sleep(0.1)
    with open(path, "a") as file:
        file.write(json.dumps({{"step": step}}) + "\\n")
for part in parts:
    part.kill()
    part.wait()
"""


def events():
    yield Event(1, 0.05, "freeze-rank", 0.3)
    yield Event(2, 0.4, "kill-driver")
    yield Event(3, 0.5, "kill-rank")
    yield Event(4, 0.6, "fill-disk", 0.1)
    yield Event(5, 1e9, "kill-rank")


FAILS = """
import json, os, sys, time
folder, first = sys.argv[1], not os.path.exists(sys.argv[1] + "/metrics.jsonl")
os.makedirs(folder, exist_ok=True)
with open(folder + "/metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": 1 if first else 2}) + "\\n")
if first:
    open(folder + "/error.txt", "w").write("Traceback\\n  a.py\\nskyasync.errors.Of: a part\\n\\n"
                                           "The last lines of logs/engine-7.log:\\nValueError: another one's")
    sys.exit(1)
"""


@pytest.mark.slow
def test_a_command_that_ends_by_itself_is_started_again_and_its_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(FAILS)
    folder, scratch, said = tmp_path / "run", tmp_path / "scratch", list[str]()
    scratch.mkdir()
    command = Command([sys.executable, str(tmp_path / "run.py"), str(folder)], folder, scratch)
    seen = FaultDriver(
        command, iter([Event(1, 1e9, "kill-rank")]), seconds=60, grace_s=10, say=said.append
    ).run()
    assert (seen.ended, len(seen.starts)) == ("the command was done", 2)
    assert [str(ending) for ending in seen.endings] == ["status 1, skyasync.errors.Of: a part"]
    assert "skyasync.errors.Of: a part" in seen.starts[1][1]


@pytest.mark.fault
@pytest.mark.slow
def test_processes_are_signalled_and_the_same_command_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    folder, scratch, said = tmp_path / "run", tmp_path / "scratch", list[str]()
    scratch.mkdir()
    command = Command([sys.executable, str(tmp_path / "run.py"), str(folder)], folder, scratch)
    driver = FaultDriver(command, events(), seconds=60, grace_s=10, say=said.append)
    seen = driver.run()
    try:
        found = {outcome.event.number: outcome.hit.partition(" ")[0] for outcome in seen.outcomes}
        assert found == {1: "rank", 2: "driver", 3: "rank", 4: ""}, "this process takes no orders"
        assert [why.partition(";")[0] for _, why in seen.starts] == [
            "the beginning",
            "its driver was killed",
        ]
        assert seen.endings == []
        assert seen.ended == "the command was done" and seen.steps[-1][1] == STEPS
        assert wrong_steps([row["step"] for row in read_rows(folder / "metrics.jsonl")]) == []
    finally:
        clean_up(driver.known.values(), f"{VARIABLE}={scratch}")
    assert leftovers(driver.known.values(), f"{VARIABLE}={scratch}", scratch) == []
    (scratch / "left").touch()
    assert temporary_files(scratch) == [f"temporary {scratch / 'left'}"]


def test_an_order_holds_for_its_time_and_what_is_done_at_once_is_done_once(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    assert orders.now("fill-disk", "a checkpoint") is None
    orders.give(Order(1, "fill-disk", time.time() + 60, 60.0))
    orders.give(Order(2, "flip-bit", time.time() + 60))
    orders.give(Order(3, "delay-messages", time.time() - 1, 5.0))
    assert [orders.now("fill-disk", f"checkpoint {n}").number for n in (1, 2)] == [1, 1]
    assert orders.now("flip-bit", "weights", once=True).number == 2
    assert orders.now("flip-bit", "weights", once=True) is None
    assert orders.now("delay-messages", "late") is None
    assert orders.taken() == {1: "checkpoint 1", 2: "weights"}


def test_one_bit_of_weights_in_memory_is_flipped_and_found_by_their_writer() -> None:
    import torch

    from skyasync.weight_sync.transfers.shared_memory import BufferWriter
    from skyasync.weight_sync.update import WeightSyncError

    weights, writer = {"a": torch.arange(16.0), "b": torch.zeros(16)}, BufferWriter()
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    for pick in (0.0, 0.5, 0.999):
        info = writer.write(specs, weights.items())
        flip_bit(Path(info["path"]), pick, bare=True)
        with pytest.raises(WeightSyncError, match="the shared memory holds"):
            writer.prove()


def test_one_bit_of_a_tensor_is_flipped_and_found_by_its_digest(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from skyasync.weight_sync.tensors import digests_of

    weights = {"a": torch.arange(8.0), "b": torch.zeros(3)}
    save_file(weights, tmp_path / "w", metadata=digests_of(weights))
    for pick in (0.0, 0.5, 0.999):
        flip_bit(tmp_path / "w", pick)
        held = digests_of(load_file(tmp_path / "w"))
        assert sum(held[name] != digest for name, digest in digests_of(weights).items()) == 1
        flip_bit(tmp_path / "w", pick)
    assert digests_of(load_file(tmp_path / "w")) == digests_of(weights)
