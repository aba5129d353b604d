"""The benchmark for a machine with a GPU runs at toy size with only torch and transformers installed."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import gpu
from tests.fork_server import program

PROGRAM = """
import json, sys, tempfile
from importlib.machinery import ModuleSpec
from dataclasses import asdict
from pathlib import Path


class Absent:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name in ("ray", "vllm", "omegaconf", "aiohttp") else None

    def create_module(self, spec):
        raise ModuleNotFoundError(f"{spec.name} is not installed here")


sys.meta_path.insert(0, Absent())
from benchmarks import gpu

with tempfile.TemporaryDirectory() as folder:
    gpu.make("toy", Path(folder))
    found = [asdict(gpu.measure(case, folder)) for case in gpu.cases("", toy=True)]
print(json.dumps(found))
"""


@pytest.mark.matrix
@pytest.mark.slow
def test_a_worker_updates_packed_and_padded_without_ray_or_vllm():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4 and len({case["tokens"] for case in found}) == 1
    assert all(
        case["tokens"] > 100 and case["seconds"] > 0 and case["planned"] > 0 for case in found
    )
    packed, recomputed = (case["planned"] for case in found[:2])
    assert recomputed < packed, "the plan counts recomputation"


@pytest.mark.matrix
@pytest.mark.slow
def test_the_command_has_a_line_for_every_case_and_the_reason_of_one_that_fails(
    fork_socket, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "executable", program(fork_socket))
    monkeypatch.setattr(sys, "argv", ["gpu", "--toy"])
    first, *_, last = gpu.cases("", toy=True)
    monkeypatch.setattr(gpu, "cases", lambda only, toy: [replace(first, updates=0), last])
    gpu.main()
    title, failed, line = capsys.readouterr().out.splitlines()
    assert title.split()[:4] == ["shape", "rows", "checkpointing", "tokens/s"]
    assert failed.split()[:3] == ["toy", "packed", "off"] and "StatisticsError: no median" in failed
    assert line.split()[:3] == ["toy", "padded", "on"] and len(line.split()) == 7
    assert float(line.split()[3].replace(",", "")) > 0
