"""A node of the cluster fails in a rollout, with the engine on it: the run continues with the other engine.

Two nodes of Ray on this machine, each with its own raylet.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

from tests import fork_server
from tests.end_to_end.runs import Trained, arguments, outside_environment
from tests.faults.restarted_command import check, left_of

pytestmark = [pytest.mark.slow, pytest.mark.fault]

STEPS, REMOVED_AFTER = 14, 3
FOUND = "found.json"
PROGRAM = """
import json, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from skyasync import main

folder, gone_behind = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
small = {"include_dashboard": False, "object_store_memory": 1 << 27}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **small})
second = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)

def remove():
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\\n") >= gone_behind):
        time.sleep(0.05)
    actors = [a for a in ray._private.state.actors().values() if a["State"] == "ALIVE"]
    there = [a["ActorClassName"] for a in actors if a["Address"]["NodeID"] == second.node_id]
    (folder / "found.json").write_text(json.dumps(there))
    cluster.remove_node(second, allow_graceful=False)

if __name__ == "__main__":
    threading.Thread(target=remove, daemon=True).start()
    sys.argv.append(f"ray.address={cluster.address}")
    main()
    cluster.shutdown()
"""


def test_a_run_goes_on_when_the_node_of_an_engine_goes_away(
    tmp_path: Path, models: dict[str, str], fork_socket: Path
) -> None:
    run, output, mark = (
        Trained(tmp_path / "run"),
        tmp_path / "output",
        f"skyasync-test-{uuid.uuid4().hex}",
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    scratch = Path(tempfile.mkdtemp(prefix="node"))
    given = arguments(
        "trainer.plan=fully_async", f"trainer.max_training_steps={STEPS}", "generator.num_inference_engines=2",
        "generator.sampling_params.max_generate_length=24", runs=tmp_path, model=models["tied"],
    )  # fmt: skip
    with output.open("w") as terminal:
        done = subprocess.run(
            [fork_server.program(fork_socket), tmp_path / "program.py", tmp_path, str(REMOVED_AFTER), *given],
            env={**outside_environment(), "TMPDIR": str(scratch), "MARK": mark},
            stdout=terminal, stderr=subprocess.STDOUT, timeout=200, check=False,
        )  # fmt: skip
    assert done.returncode == 0, output.read_text()
    there = json.loads((tmp_path / FOUND).read_text())
    assert there.count("_EngineActor") == 1 and {*there} <= {"_EngineActor", "RpcActor"}, (
        "the parts that were on the node"
    )
    check(run, STEPS)
    assert max(row.get("engines/deaths", 0) for row in run.metrics) == 1
    assert left_of(mark, scratch, joined=False) == []
