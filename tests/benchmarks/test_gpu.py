"""The benchmark for a machine with a GPU runs at toy size, where nothing but torch and transformers is installed."""

import json
import subprocess
import sys

import pytest

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
    found = [asdict(gpu.measure(case, folder)) for case in gpu.cases("", toy=True) if not case.checkpointing]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_worker_updates_packed_and_padded_without_ray_or_vllm():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    packed, padded = json.loads(done.stdout.splitlines()[-1])
    assert packed["tokens"] == padded["tokens"] > 100
    assert packed["seconds"] > 0 and packed["planned"] > 0
