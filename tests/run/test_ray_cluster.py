"""Starting a cluster that only this machine can reach, and joining one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from skyasync.run import ray_cluster


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_cluster_listens_on_the_loopback_alone(ray_session: None) -> None:
    addresses = listening({os.getpid(), *descendants(os.getpid())})
    assert len(addresses) >= 3  # the control store, the raylet, this process
    # In hexadecimal, the bytes in the host's order: IPv4, and IPv4 in IPv6.
    assert {a for a in addresses if not a.endswith("0100007F")} == set()
    assert ray.util.get_node_ip_address() == "127.0.0.1"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_that_a_run_on_one_machine_has_no_use_for_are_not_started(
    ray_session: None,
) -> None:
    commands = [
        Path(f"/proc/{child}/cmdline").read_bytes().decode() for child in descendants(os.getpid())
    ]
    assert any("raylet" in command for command in commands)
    idle = (
        "dashboard/dashboard.py",
        "autoscaler/_private/monitor.py",
        "autoscaler/v2/monitor.py",
        "ray::IDLE",
    )
    assert [command for command in commands if any(name in command for name in idle)] == []


@pytest.mark.parametrize(
    ("address", "problem"),
    [("127.0.0.1:1", "nothing answers there"), ("localhost", "neither 'auto' nor host:port")],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, problem: str) -> None:
    program = (
        "import sys; from skyasync.config import Config\n"
        "from skyasync.workers.roles import roles_with_ranks; from skyasync.run.ray_cluster import cluster\n"
        "cfg = Config(); cfg.ray.address = sys.argv[1]\n"
        "with cluster(cfg, roles=roles_with_ranks(Config())): pass\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, address], capture_output=True, text=True, timeout=30
    )
    assert f"UserError: ray.address='{address}'" in ended.stderr
    assert problem in ended.stderr


@pytest.mark.matrix
@pytest.mark.slow
def test_a_machine_with_too_few_gpus_says_so_before_anything_loads() -> None:
    program = (
        "import ray; from skyasync.config import Config\n"
        "from skyasync.workers.roles import roles_with_ranks; from skyasync.run import ray_cluster as cluster\n"
        "really = cluster.start_on_loopback\n"
        "cluster.start_on_loopback = lambda **options: really(**options, num_gpus=1)\n"
        "with cluster.cluster(Config(), roles=roles_with_ranks(Config())): pass\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (
        "UserError: Ray did not grant {'CPU': 2.0, 'GPU': 2.0} on this machine; there are"
        in ended.stderr
    )
    assert "trainer.placement.colocate_all=true" in ended.stderr


def test_variables_that_a_ray_job_has_set_are_not_sent_again() -> None:
    job = '{"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}}'
    environment = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth1",
        "HF_TOKEN": "hf_secret",
        "WANDB_API_KEY": "another secret",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": job,
    }
    assert ray_cluster.forwarded_variables(environment) == {
        "NCCL_SOCKET_IFNAME": "eth1",
        "HF_TOKEN": "hf_secret",
    }


@pytest.mark.slow
def test_processes_of_a_joined_cluster_have_the_shells_variables_for_nccl(
    ray_session: None,
) -> None:
    driver = (
        "import os, ray; from skyasync.config import Config\n"
        "from skyasync.run.ray_cluster import cluster\n"
        "cfg = Config(); cfg.ray.address = os.environ['ADDRESS']\n"
        "@ray.remote(num_cpus=0)\n"
        "def variables(): return os.environ.get('NCCL_SOCKET_IFNAME'), os.environ.get('ANOTHER')\n"
        "with cluster(cfg, roles=()):\n"
        "    print(ray.get(variables.remote(), timeout=60), flush=True)\n"
    )
    address = ray.get_runtime_context().gcs_address
    shell = os.environ | {"ADDRESS": address, "NCCL_SOCKET_IFNAME": "eth7", "ANOTHER": "stays"}
    joined = subprocess.run(
        [sys.executable, "-c", driver], env=shell, capture_output=True, text=True, timeout=120
    )
    assert "('eth7', None)" in joined.stdout, joined.stderr


def descendants(process_id: int) -> set[int]:
    children = {
        int(child)
        for task in Path(f"/proc/{process_id}/task").glob("*/children")
        for child in task.read_text().split()
    }
    return children.union(*(descendants(child) for child in children)) if children else children


def listening(processes: set[int]) -> list[str]:
    """Local addresses, in hexadecimal, of the TCP sockets on which these processes listen."""
    sockets = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            try:
                sockets.add(os.readlink(descriptor))
            except OSError:  # closed meanwhile
                continue
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    ]


def test_a_process_of_rays_that_has_ended_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray._private import worker

    parts = {
        name: subprocess.Popen(["sleep", "600"]) for name in ("gcs_server", "raylet", "log_monitor")
    }
    processes = {name: [SimpleNamespace(process=process)] for name, process in parts.items()}
    node = SimpleNamespace(all_processes=processes, get_logs_dir_path=lambda: str(tmp_path))
    monkeypatch.setattr(worker, "_global_node", node)
    parts["log_monitor"].kill()
    parts["log_monitor"].wait()
    assert ray_cluster.ended() == ""
    parts["raylet"].kill()
    parts["raylet"].wait()
    found = f"Ray's raylet (process {parts['raylet'].pid}) has ended with signal 9"
    assert ray_cluster.ended() == found
    (tmp_path / "raylet.out").write_text(
        "The raylet exited immediately because one Ray agent failed, agent_name = dashboard_agent."
    )
    assert ray_cluster.ended() == f"{found}, after its dashboard_agent"
    parts["gcs_server"].kill()
    parts["gcs_server"].wait()
    monkeypatch.setattr(worker, "_global_node", None)
    assert ray_cluster.ended() == ""
