"""The command: its subcommands, its help, and how quickly it starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from skyasync.__main__ import command
from skyasync.cli.commands import SUBCOMMANDS, whole_number
from skyasync.errors import UserError

HEAVY = {
    "torch",
    "ray",
    "transformers",
    "datasets",
    "matplotlib",
    "numpy",
    "omegaconf",
    "rich",
    "yaml",
    "jinja2",
}


def imported_by(*argv: str) -> tuple[str, set[str]]:
    """The output of a command, and the modules that it has imported at its end, in a process of its own."""
    program = (
        "import sys\nfrom skyasync.__main__ import command\ntry:\n    command(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print('MODULES', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, check=True
    )
    said, _, modules = done.stdout.rpartition("MODULES ")
    return said, {name.partition(".")[0] for name in modules.split()}


def test_help_lists_every_verb_and_imports_nothing_heavy() -> None:
    said, modules = imported_by("--help")
    assert all(f"\n  {name} " in said for name in SUBCOMMANDS)
    assert modules & HEAVY == set()


@pytest.mark.parametrize(
    "subcommand", ["export", "report", "runs", "rollout", "evaluate", "replay"]
)
def test_help_of_a_subcommand_imports_no_model_library(subcommand: str) -> None:
    said, modules = imported_by(subcommand, "--help")
    assert f"skyasync {subcommand}" in said
    assert modules & {"torch", "ray", "transformers", "datasets", "matplotlib"} == set()


@pytest.mark.parametrize(
    "subcommand", [name for name, subcommand in SUBCOMMANDS.items() if subcommand.needs]
)
def test_a_verb_without_the_arguments_that_it_needs_shows_its_help_as_an_error(
    subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command([subcommand])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and f"skyasync {subcommand}" in said.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "--step x: not a whole number of at least 1"),
        ("0", "--step 0: not a whole number of at least 1"),
        ("1" * 5000, f"--step {'1' * 40}: not a whole number of at least 1 with up to 18 digits"),
    ],
)
def test_an_option_that_is_no_whole_number_is_said(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        whole_number(text, "--step")
    assert str(refused.value) == message


def test_evaluate_names_the_run_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sort-1").mkdir(parents=True)
    for name, hint in (
        ("runs/none", "folder\n"),
        ("runs/sort", "did you mean runs/sort-1?"),
        ("mine", "folder\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            command(["evaluate", "--of", name])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert (
            said.startswith(f"error: --of {name}: there is no such run, checkpoint or model folder")
            and hint in said
        )


def test_a_reader_that_ends_early_is_no_error() -> None:
    program = [sys.executable, "-u", "-m", "skyasync", "--help"]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == ""
    assert done.returncode == 128 + signal.SIGPIPE


def test_a_server_without_a_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["serve", "--port", "8000"])
    assert ended.value.code == 2
    assert "skyasync serve takes the model first" in capsys.readouterr().err


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_verb_has_a_home(name: str) -> None:
    module, _, function = SUBCOMMANDS[name].home.partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("simulat", "simulate"), ("evalute", "evaluate"), ("trian", "train"), ("show-runs", "runs")],
)
def test_an_unknown_verb_is_answered_with_the_nearest(
    wrong: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command([wrong, "trainer.seed=1"])
    assert ended.value.code == 2
    assert f"unknown subcommand {wrong!r}: did you mean {right!r}" in capsys.readouterr().err


def test_without_a_verb_settings_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["trainer.sed=1"], ["train", "trainer.sed=1"]):
        with pytest.raises(SystemExit):
            command(argv)
        assert "unknown key 'trainer.sed': did you mean trainer.seed" in capsys.readouterr().err


def test_help_of_a_group_is_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(["--help", "trainer.placement"])
    assert "trainer.placement.colocate_all" in capsys.readouterr().out


def test_the_package_installs_the_command() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["skyasync"].partition(":")
    assert callable(getattr(import_module(module), function))
