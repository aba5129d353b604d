"""Checks of a documented command line by the parsers of its program; nothing is started.

Invariant: ``check`` either raises, or the program's own parser has checked every option and key of the command.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import skyasync.config.load as loading
from skyasync.__main__ import command
from skyasync.cli.commands import SUBCOMMANDS
from skyasync.cli.train import configuration
from skyasync.config.check import check_config
from skyasync.planning.rehearsal import HELP as REHEARSAL_HELP
from tests.docs.pages import ROOT, plain

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
ELLIPSES = ("...", "key=value")
SHELL = (
    "set",
    "nvidia-smi",
    "git",
    "docker",
    "sbatch",
    "kubectl",
    "sky",
    "source",
    "bash",
    "ruff",
    "mypy",
    "lint-imports",
    "pre-commit",
    "mkdocs",
    "cd",
)


class ParsedError(BaseException):
    """The command line is valid; it is not executed."""


@contextmanager
def only_parsed() -> Iterator[None]:
    """Inside, a program that has parsed its arguments successfully ends with ``ParsedError``."""

    def checked(*args: object, **options: object) -> list[str]:
        if found := check_config(*args, **options):
            return found
        raise ParsedError

    def parse_args(parser: ArgumentParser, *args: object) -> object:
        with patch.object(ArgumentParser, "parse_known_args", parse_known):
            parse(parser, *args)
        raise ParsedError

    def parse_known_args(parser: ArgumentParser, *args: object) -> object:
        with patch.object(ArgumentParser, "parse_known_args", parse_known):
            parse_known(parser, *args)
        raise ParsedError

    def started(*args: object, **options: object) -> None:
        raise AssertionError(f"would have started {args}")

    parse, parse_known = ArgumentParser.parse_args, ArgumentParser.parse_known_args
    with (
        patch.object(loading, "check_config", checked),
        patch.object(ArgumentParser, "parse_args", parse_args),
        patch.object(ArgumentParser, "parse_known_args", parse_known_args),
        patch.object(subprocess, "Popen", started),
    ):
        yield


def check(words: Sequence[str], files: Path) -> None:
    """Raises the error of the program's own parser; ``files`` is the folder of the page's files."""
    words = plain(list(words))
    if "uv" in words[:1] or "pip" in words[:1]:
        _check_install(words)
    elif words[0] == "ray":
        _check_ray(words[1:], files)
    elif words[0] == "skyasync":
        _check_verb(words[1:])
    elif words[:2] == ["python", "-m"]:
        _check_verb(words[3:]) if words[2] == "skyasync" else _check_module(words[2], words[3:])
    elif words[0] == "python":
        _check_program(files / words[1], words[2:])
    elif words[0] == "pytest":
        assert all(
            (ROOT / word.partition("::")[0]).exists() for word in words[1:] if word.endswith(".py")
        )
    elif words[0] == "bash":
        subprocess.run(["bash", "-n", ROOT / words[1]], check=True)
    else:
        assert words[0] in SHELL or "=$(" in words[0], f"no parser is known for {words[0]}"


def _check_verb(argv: list[str]) -> None:
    argv = [word for word in argv if word not in ELLIPSES]
    subcommand = SUBCOMMANDS.get(argv[0]) if argv else None
    if subcommand is None or argv[0] in ("train", "plan", "simulate", "rollout"):
        _parse(lambda: command(argv))
        return
    if argv[0] != "serve":  # whose options are vLLM's
        home = vars(import_module(subcommand.home.partition(":")[0]))
        text = REHEARSAL_HELP if argv[0] == "rehearse" else home.get("HELP", "--from")
        for word in argv[1:]:
            name = word.partition("=")[0]
            is_option = word.startswith("--") and name not in ("--config", "--help")
            assert not is_option or name in text, f"{argv[0]} has no option {name}"
    if subcommand.settings:
        _parse(
            lambda: configuration(
                ["trainer.resume_mode=none", *(w for w in argv[1:] if _is_setting(w))]
            )
        )


def _is_setting(word: str) -> bool:
    return "=" in word and not word.startswith("--")


def _parse(program: object) -> None:
    with only_parsed():
        try:
            program()  # type: ignore[operator]
        except ParsedError:
            return
        except SystemExit as ended:
            assert not ended.code, "refused"  # its words are in the captured output


def _check_module(module: str, argv: list[str]) -> None:
    assert find_spec(module), module
    _parse(
        lambda: _as_program(lambda: runpy.run_module(module, run_name="__main__"), [module, *argv])
    )


def _check_program(file: Path, argv: list[str]) -> None:
    assert file.exists(), f"no block of the page is {file.name}"
    _parse(
        lambda: _as_program(
            lambda: runpy.run_path(str(file), run_name="__main__"), [str(file), *argv]
        )
    )


def _as_program(run: object, argv: list[str]) -> None:
    with patch.object(sys, "argv", argv):
        run()  # type: ignore[operator]


def _check_install(words: Sequence[str]) -> None:
    """The extras exist."""
    named = [word for before, word in pairwise(words) if before == "--extra"]
    named += [extra for word in words if "[" in word and word.startswith("skyasync")
              for extra in word[word.index("[") + 1 : -1].split(",")]  # fmt: skip
    assert set(named) <= EXTRAS.keys()


def _check_ray(words: list[str], files: Path) -> None:
    """By Ray's own commands; the programs that they start are checked as well."""
    from ray.scripts.scripts import cli

    rest: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, rest = words[:at], words[at + 1 :]
    group, context = cli, cli.make_context("ray", [words[0]], resilient_parsing=True)
    while hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context("ray", [*words, *(["--", *rest] if rest else [])], parent=context)
    if rest:
        check(rest, files)
