"""The page about the command says what the command does: its verbs are these, its quick commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from skyasync.__main__ import command
from skyasync.config.keys import Keys
from skyasync.config.schema import Config
from skyasync.tools.verbs import LISTED, VERBS

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


def commands(language: str) -> list[list[str]]:
    """The command lines of the blocks in a language, without the command's name."""
    blocks = re.findall(r"^```([a-z]*)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    lines = "".join(text for name, text in blocks if name == language).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("skyasync ")]


def test_the_table_has_every_verb() -> None:
    assert re.findall(r"^\| `([a-z]+)` \|", PAGE, flags=re.MULTILINE) == LISTED


@pytest.mark.parametrize("argv", commands("bash"), ids=" ".join)
def test_the_quick_commands_run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        command(argv)
    except SystemExit as ended:
        assert not ended.code
    assert capsys.readouterr().out


def test_the_other_commands_name_verbs_options_and_keys_that_exist() -> None:
    keys = Keys.of(Config)
    shown = [argv for argv in commands("") if argv and not argv[0].startswith("[")]
    assert len(shown) > 10
    for argv in shown:
        verb = VERBS[argv[0]]
        for word in argv[1:]:
            name = word.partition("=")[0]
            if word.startswith("--"):
                assert name in verb.options, word
            elif "=" in word and name != "key":
                assert name in keys, word


def test_the_settings_of_the_page_exist() -> None:
    keys = Keys.of(Config)
    named = re.findall(r"`((?:trainer|generator|data)\.[a-z_.]+)=", PAGE)
    assert len(named) > 6
    assert [name for name in named if name not in keys] == []
