"""Errors in settings and inputs are reported in one line, before any process starts, and nothing is left."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import skyasync.run.ray_cluster
from skyasync import BasePPOExp, TrainerCallback, main
from skyasync.rollout.tokenizer import quick_tokenizer
from tests.user_errors.invalid_inputs import INPUTS, NO_EFFECT, PARTS

SECONDS = 10.0  # of one core: machines differ by three times
PARTS_FILE = Path(__file__).with_name("parts.py")
CASES = [*NO_EFFECT, *INPUTS, *PARTS]


def arguments(overrides: list[str], inputs: Path, runs: Path) -> list[str]:
    """A command line that is valid except for ``overrides``."""
    given = dict(text.format(x=inputs).split("=", 1) for text in overrides)
    usual = {
        "trainer.policy.model.path": inputs / "model",
        "trainer.runs_dir": runs,
        "trainer.max_prompt_length": 64,
        "generator.backend": "transformers",
        "environment.env_class": "tests.user_errors.parts:Env",
        "data.train_data": inputs / "rows.jsonl",
    }
    return [f"{key}={value}" for key, value in {**usual, **given}.items()]


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inputs: Path) -> None:
    """Starting a process fails; the machine has no GPU."""

    def starts(*_: object, **__: object) -> None:
        raise AssertionError("the run was not refused")

    monkeypatch.setattr(skyasync.run.ray_cluster, "cluster", starts)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    quick_tokenizer(str(inputs / "model"))  # its library is imported by now


def refused(
    argv: list[str], capsys: pytest.CaptureFixture[str], experiment: type[BasePPOExp] = BasePPOExp
) -> str:
    """The one line that is printed."""
    started = time.process_time()
    with pytest.raises(SystemExit) as end:
        main(experiment, argv)
    assert time.process_time() - started < SECONDS
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a separate program, whatever other tests of this process have started."""
    if "ray" in sys.modules:
        monkeypatch.setattr("ray.is_initialized", lambda: False)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("overrides", "found", "way_out"), CASES, ids=[" ".join(case[0]) for case in CASES]
)
def test_what_is_wrong_is_told_in_one_line_before_anything_starts(
    overrides: list[str],
    found: str,
    way_out: str,
    inputs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if any(text.startswith("ray.address") for text in overrides):
        pytest.skip(
            "asked of Ray's own code, see test_the_command_line_refuses_without_importing_torch"
        )
    line = refused(arguments(overrides, inputs, tmp_path / "runs"), capsys)
    assert line.startswith("error: ") and found in line and way_out in line, line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"trainer.plan={PARTS_FILE}:Undeclared", f"generator.backend={PARTS_FILE}:Engine"],
        [
            f"trainer.plan={PARTS_FILE}:Longer",
            f"trainer.algorithm.policy_loss_type={PARTS_FILE}:loss",
        ],
        [f"environment.reward_funcs=[{PARTS_FILE}:of_trl]", "environment.env_class=reward"],
    ],
)
def test_a_command_line_without_a_fault_is_not_refused(
    overrides: list[str], inputs: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="was not refused"):
        main(BasePPOExp, arguments(overrides, inputs, tmp_path / "runs"))
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("on_stepend", "unknown hook 'on_stepend': did you mean 'on_step_end'"),
        ("on_step_end", "must take (self, trainer, metrics)"),
    ],
)
def test_a_callback_with_an_unknown_hook_is_rejected(
    method: str, line: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = type("Mine", (TrainerCallback,), {method: lambda self, trainer: None})
    try:
        assert line in refused(arguments([], inputs, tmp_path / "runs"), capsys)
    finally:
        del mine
        gc.collect()  # all definitions count, and the next test defines nothing


def test_a_callback_that_is_none_is_refused(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(BasePPOExp, arguments([], inputs, tmp_path / "runs"), callbacks=["early stopping"])  # type: ignore[list-item]
    assert "callback str must be a subclass of skyasync.TrainerCallback" in capsys.readouterr().err


HEAVY = ("ray", "torch", "transformers", "vllm")
COMMANDS: list[tuple[list[str], list[str]]] = [  # what is wrong, what is imported to find it
    (["trainer.max_staleness=2"], []),
    (["data.train_data={x}/none.parquet"], []),
    (
        ["trainer.max_prompt_length=3"],
        ["transformers"],
    ),  # its tokenizers, which are a third of it and without torch
    (["trainer.policy.model.path=no-such-owner/no-such-model"], []),
    (["generator.backend=vllm", "generator.inference_engine_tensor_parallel_size=3"], []),
    (["ray.address=nowhere"], ["ray", "transformers"]),
]
RUN = f"""
import atexit, runpy, sys
atexit.register(lambda: print(*(name for name in {HEAVY} if name in sys.modules)))
runpy.run_module("skyasync", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("overrides", "imported"), COMMANDS, ids=[" ".join(command) for command, _ in COMMANDS]
)
def test_the_command_line_refuses_without_importing_torch(
    overrides: list[str], imported: list[str], inputs: Path, tmp_path: Path
) -> None:
    """What takes seconds is imports: which of them a refusal needs is the same on every machine."""
    ran = subprocess.run(
        [sys.executable, "-c", RUN, *arguments(overrides, inputs, tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert (ran.returncode, ran.stdout.split()) == (2, imported)
    assert re.fullmatch(r"error: [^\n]+\n", ran.stderr), ran.stderr
    assert not any((tmp_path / "runs").glob("*"))
