"""A user's own file, outside of the package, changes the loop, the loss and the environment.

The files run as their own programs: none of them can be imported by name before the program starts.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ray

from tests import fork_server
from tests.end_to_end import leftovers
from tests.end_to_end.runs import Trained, arguments, outside_environment

pytestmark = pytest.mark.slow

#: A loop that stops when it is good enough, and a user's loss, selected by its key.
LOOP_AND_LOSS = """
from skyasync import BasePPOExp, RayPPOTrainer
from skyasync import main
from skyasync.algorithms import POLICY_LOSSES

calls = 0


@POLICY_LOSSES.register("plain")
def plain(current, advantages, *, scale=1.0):
    global calls
    calls += 1
    return -scale * advantages * current, {"my_calls": advantages * 0 + calls}


class Patient(RayPPOTrainer):
    async def train(self):
        for prompts in self.remaining_prompts():
            rollouts = [await self.generate(prompts) for _ in range(2)]
            best = max(rollouts, key=lambda rollout: rollout.metrics["reward/mean"])
            best.metrics["my/worse"] = min(r.metrics["reward/mean"] for r in rollouts)
            status = await self.train_on(best)
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)


class PatientExp(BasePPOExp):
    def get_trainer(self, **parts):
        return Patient.get_trainer(**parts)


if __name__ == "__main__":
    main(PatientExp)
"""

#: An environment as ``module:Class`` for half of the rows, and by a registered id for the others.
ENVIRONMENTS = """
from skyasync import BaseTextEnv
from skyasync import main
from skyasync.envs import register


class Short(BaseTextEnv):
    def step(self, action):
        reward = self.env_config["best"] / (1 + len(action))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}

    def get_metrics(self):
        return {"in_file": 1.0}


class Named(Short):
    def get_metrics(self):
        return {"by_name": float(self.extras["weight"])}


register("named", Named)

if __name__ == "__main__":
    main(plan="one_step_off")
"""

ROWS = '{"prompt": "Sort the digits: 3120%d"}\n{"prompt": "Sort: 42%d", "env_class": "named", "weight": 2.5}\n'


def run_program(python: str, source: str, folder: Path, model: str, *overrides: str) -> Trained:
    """Write the program into ``folder`` and run it there, with ``python user_main.py key=value ...``."""
    (folder / "user_main.py").write_text(source)
    command = [python, "user_main.py", *arguments(*overrides, runs=folder, model=model)]
    ended = subprocess.run(
        command,
        cwd=folder,
        env=outside_environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return Trained(folder / "run")


def test_a_loop_and_a_loss_in_a_users_file(
    tmp_path: Path, models: dict[str, str], fork_socket: Path
) -> None:
    run = run_program(
        fork_server.program(fork_socket), LOOP_AND_LOSS, tmp_path, models["tied"],
        "trainer.algorithm.policy_loss_type=plain", "trainer.algorithm.extra.scale=3.0",
        "trainer.max_training_steps=2",
    )  # fmt: skip
    assert all(row["my/worse"] <= row["reward/mean"] for row in run.metrics)
    assert run.series("policy/my_calls") == [
        1,
        2,
    ]  # one process has the loss, which was called once per step


@pytest.mark.matrix
def test_environments_in_a_users_file_on_a_cluster_that_is_joined(
    ray_session: None, tmp_path: Path, models: dict[str, str], fork_socket: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(ROWS % (digit, digit) for digit in range(8)))
    run = run_program(
        fork_server.program(fork_socket), ENVIRONMENTS, tmp_path, models["tied"],
        "environment.env_class=user_main:Short", "environment.env_config.best=0.5", "data.train_data=rows.jsonl",
        "trainer.max_training_steps=2", f"ray.address={ray.get_runtime_context().gcs_address}",
    )  # fmt: skip
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
    assert all(row["env/in_file"] == 1.0 and row["env/by_name"] == 2.5 for row in run.metrics)
    assert all(0 < row["reward/mean"] <= 0.5 for row in run.metrics)
    assert run.series("staleness/max") == [0, 1]
