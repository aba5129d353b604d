"""Completion: the words that may follow, and the shells that request them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skyasync.cli.completion import SCRIPTS, candidates, completion
from skyasync.errors import UserError

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("skyasync runs", ["runs"]),
        ("skyasync ev", ["evaluate"]),
        ("skyasync trainer.pl", ["trainer.placement.", "trainer.plan="]),
        ("skyasync train trainer.eval_mo", ["trainer.eval_mode="]),
        ("skyasync trainer.eval_mode=", ["trainer.eval_mode=overlap", "trainer.eval_mode=pause"]),
        ("skyasync trainer.plan=sync trainer.plan=st", ["trainer.plan=streamed"]),
        ("skyasync trainer.report=t", ["trainer.report=true"]),
        ("skyasync train n_samples", ["generator.n_samples_per_prompt="]),
        ("skyasync plan --gp", ["--gpus", "--gpu-memory"]),
        ("skyasync plan --gpus 8 --gpu", ["--gpu-memory"]),
        ("skyasync --help trainer.placement.ti", ["trainer.placement.timeout_s"]),
        ("skyasync completion ", ["bash", "zsh", "fish"]),
        ("skyasync simulat trainer", []),
        ("skyasync trainer.seed=", []),
    ],
)
def test_words(line: str, words: list[str]) -> None:
    assert candidates(line) == words


def test_runs_are_completed_from_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert candidates("skyasync report ") == ["runs/first", "runs/second"]
    assert candidates("skyasync report runs/s") == ["runs/second"]


def test_an_unknown_shell_is_answered_with_the_known() -> None:
    with pytest.raises(UserError, match=r"unknown shell 'bas': did you mean 'bash'\? allowed: bash, fish, zsh"):
        completion(["bas"])


@pytest.fixture
def path_with_command(tmp_path: Path) -> str:
    """A PATH with the command."""
    script = tmp_path / "skyasync"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} -m skyasync "$@"\n')
    script.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("line", "reply"),
    [("skyasync trainer.eval_mo", "trainer.eval_mode="), ("skyasync trainer.eval_mode=pa", "pause")],
)
def test_bash_gets_what_it_needs_to_insert(line: str, reply: str, path_with_command: str) -> None:
    program = (
        f'source <(skyasync completion bash)\nCOMP_LINE="{line}" COMP_POINT={len(line)}\n'
        'compopt() { :; }\n_skyasync\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": path_with_command}
    done = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [reply]


def test_fish_completes(path_with_command: str, tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("there is no fish here")
    program = "skyasync completion fish | source\ncomplete -C 'skyasync trainer.eval_mode=pa'"
    environment = {**os.environ, "PATH": path_with_command, "HOME": str(tmp_path)}
    done = subprocess.run(["fish", "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["trainer.eval_mode=pause"]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_that_shells_language(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    subprocess.run([shell, "-n", "/dev/stdin"], input=SCRIPTS[shell], text=True, check=True)
