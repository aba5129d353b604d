"""``skyasync evaluate``: errors before anything starts."""

import pytest

from skyasync.cli.commands import SUBCOMMANDS
from skyasync.cli.evaluate import evaluate
from skyasync.errors import UserError


def test_a_run_that_is_not_there_is_named_and_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(UserError, match=r"--of runs/frist: there is no such run, .*: did you mean runs/first"):
        evaluate(["--of", "runs/frist"])


def test_without_arguments_the_usage_is_an_error(capsys):
    assert SUBCOMMANDS["evaluate"].carry_out([]) == 2
    assert capsys.readouterr().err.startswith("usage: skyasync evaluate")
