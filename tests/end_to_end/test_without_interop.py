"""The library without ``skyasync.interop`` trains, resumes and simulates, and reports in one line what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import skyasync
from tests.end_to_end.runs import arguments

pytestmark = pytest.mark.slow

TRAIN_RESUME_SIMULATE = """
import json, sys
from skyasync import BasePPOExp, load_config
from skyasync.simulate.__main__ import main as simulate

*settings, out = sys.argv[1:]
for steps in (1, 2):
    run = BasePPOExp(load_config([*settings, f"trainer.max_training_steps={steps}"]))
    run.run()
simulate(["trainer.max_training_steps=20", "simulate.slots=8"])
rows = [json.loads(line) for line in (run.run_dir.path / "metrics.jsonl").read_text().splitlines()]
with open(out, "w") as file:
    json.dump({"package": sys.modules["skyasync"].__file__, "steps": [row["step"] for row in rows]}, file)
"""
REJECTED = """
import sys
from skyasync import BasePPOExp, load_config
from skyasync.agents.programs import load_program
from skyasync.envs import make
from skyasync.errors import UserError
from skyasync.rewards import find
from skyasync.__main__ import command

class Agent:
    async def run(self, data, **extra): ...

sys.modules["agents"] = sys.modules["__main__"]
for call in (
    lambda: load_config(["trainer.train_batch_sise=3"]),
    lambda: load_config(["actor_rollout_ref.rollout.n=3"]),
    lambda: make("openrlhf"),
    lambda: BasePPOExp(load_config(["generator.agent_func_path=agent.py"])).prepare(),
    lambda: load_program("agents:Agent"),
    lambda: find("http://host:1/reward"),
    lambda: command(["translate", "run.sh"]),
):
    try:
        call()
        print("no error")
    except UserError as error:
        print(error)
    except SystemExit as end:
        print(end.code)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a program that finds a copy of the package without the folder."""
    folder = tmp_path_factory.mktemp("without")
    package = Path(skyasync.__path__[0])
    shutil.copytree(package, folder / "skyasync", ignore=shutil.ignore_patterns("interop"))
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


@pytest.mark.matrix
def test_it_trains_resumes_and_simulates(
    environment: dict[str, str], models: dict[str, str], tmp_path: Path
) -> None:
    settings = arguments(
        "trainer.ckpt_interval=1", "trainer.resume_mode=latest", runs=tmp_path, model=models["tied"]
    )
    out = tmp_path / "out.json"
    program = [sys.executable, "-c", TRAIN_RESUME_SIMULATE, *settings, str(out)]
    ran = subprocess.run(
        program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(out.read_text())
    assert said["package"].startswith(environment["PYTHONPATH"])
    assert said["steps"] == [1, 2]
    assert "fully_async" in ran.stdout


def test_what_needs_it_is_rejected_in_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", REJECTED],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    lacking = "needs skyasync.interop, which is not part of this installation"
    nearest, unknown, environment_name, *others = ran.stdout.splitlines()
    assert (
        nearest == "unknown key 'trainer.train_batch_sise': did you mean trainer.train_batch_size?"
    )
    assert unknown.startswith("unknown key 'actor_rollout_ref.rollout.n'")
    assert "unknown environment 'openrlhf'" in environment_name
    assert others == [
        f"generator.agent_func_path=agent.py {lacking}",
        f"the class Agent in generator.agent_program {lacking}",
        f"environment.reward_funcs=http://host:1/reward {lacking}",
        "2",
    ]
    assert f"error: translate {lacking}" in ran.stderr
