"""Engines on two nodes of a cluster: those on another node than rank 0 get the weights by broadcast, also a replacement
engine.

The two nodes of Ray on this machine can map each other's memory, so the test looks up which memory an engine maps.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.end_to_end.runs import Trained, arguments, outside_environment
from tests.faults.restarted_command import check, left_of

pytestmark = [pytest.mark.slow, pytest.mark.fault]

STEPS, KILLED_AFTER = 9, 4
PROGRAM = """
import json, os, signal, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from skyasync import BasePPOExp, load_config

folder, steps, killed_behind, *runs = json.loads(Path(sys.argv[1]).read_text())
small = {"include_dashboard": False, "object_store_memory": 1 << 27}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **small})
second = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)

def mapped(pid):
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if "memfd:skyasync-weights" in line})

def held(pid):
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:skyasync-weights" in os.readlink(descriptor):
                found.append(str(os.stat(descriptor).st_ino))
        except FileNotFoundError:
            pass
    return sorted(found)

def look():
    actors = [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
    return [{"name": actor["ActorClassName"].rpartition(".")[2], "pid": actor["Pid"], "mapped": mapped(actor["Pid"]),
             "second": actor["Address"]["NodeID"] == second.node_id, "held": held(actor["Pid"])} for actor in actors]

def watch(name, kills):
    metrics, seen = Path(folder) / name / "metrics.jsonl", {}
    def rows():
        return metrics.read_text().count("\\n") if metrics.exists() else 0
    def wait_for(count):
        while rows() < count:
            time.sleep(0.02)
    wait_for(killed_behind)
    seen["before"] = look()
    if kills:
        there = [each["pid"] for each in seen["before"] if each["name"] == "_EngineActor" and each["second"]]
        os.kill(there[0], signal.SIGKILL)
        wait_for(killed_behind + 4)
        seen["after"] = look()
    (Path(folder) / f"{name}.json").write_text(json.dumps(seen))

if __name__ == "__main__":
    for name, kills, given in runs:
        watching = threading.Thread(target=watch, args=[name, kills])
        watching.start()
        BasePPOExp(load_config([*given, f"ray.address={cluster.address}"])).run()
        watching.join()
    cluster.shutdown()
"""


def test_engines_of_another_node_get_the_weights_by_broadcast(
    tmp_path: Path, models: dict[str, str], fork_socket: Path
) -> None:
    names = {"sync": False, "one_step_off": True}  # whether the engine of that node is killed
    output, mark = tmp_path / "output", f"skyasync-test-{uuid.uuid4().hex}"
    runs = [(name, kills, arguments(
        f"trainer.plan={name}", f"trainer.run_name={name}", f"trainer.max_training_steps={STEPS}",
        "generator.num_inference_engines=2", "environment.num_workers=1", runs=tmp_path, model=models["tied"],
    )) for name, kills in names.items()]  # fmt: skip
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "given.json").write_text(json.dumps([str(tmp_path), STEPS, KILLED_AFTER, *runs]))
    scratch = Path(tempfile.mkdtemp(prefix="node"))
    with output.open("w") as terminal:
        done = subprocess.run(
            [fork_server.program(fork_socket), tmp_path / "program.py", tmp_path / "given.json"],
            env={**outside_environment(), "TMPDIR": str(scratch), "MARK": mark},
            stdout=terminal, stderr=subprocess.STDOUT, timeout=250, check=False,
        )  # fmt: skip
    said = output.read_text()
    assert done.returncode == 0, said
    assert said.count("weights go to engines on 1 other node by broadcast") == 2, said
    for (name, killed), settled in zip(names.items(), (0, 1), strict=True):
        run = Trained(tmp_path / name)
        check(run, STEPS)
        assert run.versions == [
            (step, {max(0, step - 1 - settled)}) for step in range(1, STEPS + 1)
        ]
        assert all(0.0 <= reward <= 1.0 for reward in run.series("reward/mean")) and any(
            run.series("reward/mean")
        )
        assert max(row.get("engines/deaths", 0) for row in run.metrics) == killed
        assert max(run.series("sync/logprob_gap")) <= 1e-5, (
            "the verification prompts run on both engines"
        )
        remote = [
            row for row in run.metrics if "sync/bytes_to_nodes" in row
        ]  # 0 while there is no engine
        assert len(remote) == STEPS if not killed else KILLED_AFTER <= len(remote) <= STEPS
        assert (
            len({row["sync/bytes_to_nodes"] for row in remote}) == 1
            and remote[0]["sync/bytes_to_nodes"] > 100_000
        )
        assert min(row["sync/to_nodes_s"] for row in remote) > 0
        seen = json.loads((tmp_path / f"{name}.json").read_text())
        for actors in seen.values():
            of_their_own_node(actors)
        assert set(seen) == ({"before", "after"} if killed else {"before"})
        if killed:
            assert {e["pid"] for e in engines_of(seen["before"])} != {
                e["pid"] for e in engines_of(seen["after"])
            }
    assert left_of(mark, scratch, joined=False) == []


def engines_of(actors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [actor for actor in actors if actor["name"] == "_EngineActor"]


def of_their_own_node(actors: list[dict[str, Any]]) -> None:
    """An engine on the policy's node maps the policy's buffer and computes on one copy of it; others do not."""
    (policy,) = [actor for actor in actors if actor["name"] == "PolicyWorker"]
    assert not policy["second"] and sorted(engine["second"] for engine in engines_of(actors)) == [
        False,
        True,
    ]
    for engine in engines_of(actors):
        assert bool({*engine["mapped"]} & {*policy["held"]}) != engine["second"]
