"""Errors that only a process can detect end the run with one line on the terminal, and a traceback in its folder."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from skyasync import BasePPOExp, BaseTextEnv, RayPPOTrainer, TrainerCallback, main
from skyasync.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from tests import fork_server
from tests.inference.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow

HERE = "tests.user_errors.test_process_errors"
LIGHT = "tests.user_errors.light_reward"


class StepRaises(BaseTextEnv):
    def step(self, action: str) -> Any:
        raise ValueError("no such move")


class NeverMade(BaseTextEnv):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("no board to play on")

    def step(self, action: str) -> Any:
        raise AssertionError("it was never made")


class Fine(BaseTextEnv):
    def step(self, action: str) -> Any:
        return {"observations": [], "reward": float(len(action)), "done": True, "metadata": {}}


class EngineRaises:
    generate = stream = score = pause = resume = abort = update_weights = sleep = wake = stats = (
        None
    )

    def __init__(self, config: Any) -> None: ...

    async def start(self) -> None:
        raise MemoryError("no memory for this model")

    async def shutdown(self) -> None: ...


class WithoutSteps(RayPPOTrainer):
    async def train(self) -> None:
        """Lacks its loop."""


class CallbackRaises(TrainerCallback):
    def on_start(self, trainer: Any) -> None:
        raise LookupError("nothing to begin with")


class WithCallback(BasePPOExp):
    def get_callbacks(self) -> list[TrainerCallback]:
        return [CallbackRaises()]


class NoGenerator(BasePPOExp):
    def get_generator(self, *args: Any, **parts: Any) -> Any:
        raise ConnectionError("no generator anywhere")


def loss_raises(current: Any, advantages: Any) -> Any:
    raise ArithmeticError("this loss is none")


def estimator_raises(rewards: Any, mask: Any) -> Any:
    raise ArithmeticError("this estimator is none")


def rows() -> list[dict[str, str]]:
    return [{"prompt": "1 2 3"}] * 8


def late_rows() -> list[dict[str, str]]:
    return [*rows(), {"promt": "4"}]


FAILURES = {
    "an environment's step": ([f"environment.env_class={HERE}:StepRaises"], "ValueError: no such move"),
    "an environment's making": ([f"environment.env_class={HERE}:NeverMade"], "no board to play on"),
    "a reward function": (
        ["environment.env_class=reward", f"environment.reward_funcs=[{LIGHT}:reward_raises]"], "KeyError: 'verdict'",
    ),
    "an agent program": (
        ["environment.env_class=''", f"generator.agent_program={LIGHT}:program_raises"], "(data, base_url, api_key)",
    ),
    "an engine": ([f"generator.backend={HERE}:EngineRaises"], "MemoryError: no memory for this model"),
    "a loss": (["trainer.algorithm.policy_loss_type=raises"], "ArithmeticError: this loss is none"),
    "an estimator": (["trainer.algorithm.advantage_estimator=raises"], "ArithmeticError: this estimator is none"),
    "a plan": ([f"trainer.plan={HERE}:WithoutSteps"], "WithoutSteps.train has ended without a step, and "),
    "a row": ([f"data.train_data={HERE}:late_rows"], "data row 8 has no column 'prompt'"),
    "a callback": ([WithCallback], "LookupError: nothing to begin with"),
    "a factory": ([NoGenerator], "ConnectionError: no generator anywhere"),
}  # fmt: skip
QUICK = ["a reward function", "an engine", "a loss"]  # a process of each kind


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_llama(folder / "whole", tied=True)
    return folder


def arguments(overrides: list[Any], model: Path, runs: Path) -> list[str]:
    given = dict(o.split("=", 1) for o in overrides if isinstance(o, str))
    usual = {
        "trainer.policy.model.path": model / "whole",
        "trainer.runs_dir": runs,
        "trainer.run_name": "run",
        "trainer.train_batch_size": 2,
        "trainer.max_training_steps": 2,
        "trainer.max_prompt_length": 32,
        "generator.backend": "transformers",
        "generator.n_samples_per_prompt": 2,
        "generator.sampling_params.max_generate_length": 4,
        "environment.env_class": f"{HERE}:Fine",
        "data.train_data": f"{HERE}:rows",
        "data.apply_chat_template": "false",
    }
    return [f"{key}={value}" for key, value in {**usual, **given}.items()]


@pytest.mark.parametrize(
    "part",
    [part if part in QUICK else pytest.param(part, marks=pytest.mark.matrix) for part in FAILURES],
)
def test_a_failure_in_a_process_is_one_line_and_its_traceback_is_in_the_run_s_folder(
    part: str, ray_session: None, model: Path, tmp_path: Path,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(POLICY_LOSSES, "raises", loss_raises)
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "raises", estimator_raises)
    overrides, text = FAILURES[part]
    experiment = next((o for o in overrides if isinstance(o, type)), BasePPOExp)
    with pytest.raises(SystemExit) as end:
        main(experiment, arguments(overrides, model, tmp_path))
    assert end.value.code in (1, 2)
    assert_one_line(capfd.readouterr().err, text, tmp_path / "run" / "error.txt")


@pytest.mark.matrix
def test_so_it_is_on_the_command_line(model: Path, tmp_path: Path, fork_socket: Path) -> None:
    ran = subprocess.run(
        [fork_server.program(fork_socket), "-m", "skyasync", *arguments(FAILURES["an engine"][0], model, tmp_path)],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert ran.returncode == 1
    assert_one_line(
        ran.stderr, "MemoryError: no memory for this model", tmp_path / "run" / "error.txt"
    )
    assert "Traceback" not in ran.stdout


def assert_one_line(printed: str, text: str, file: Path) -> None:
    """One line that begins with ``error: `` and nothing else that looks like a traceback."""
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and text in lines[0] and "error.txt" in lines[0], printed
    assert not re.search(r"Traceback|^\s+File ", printed, re.MULTILINE), printed
    assert "Traceback" in file.read_text() or "File " in file.read_text()
