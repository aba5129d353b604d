"""``skyasync evaluate``: what is refused before anything starts."""

import pytest

from skyasync.errors import UserError
from skyasync.tools.evaluate import evaluate


def test_a_run_that_is_not_there_is_named_and_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(UserError, match="--of runs/frist: there is no such folder in runs: did you mean runs/first"):
        evaluate(["--of", "runs/frist"])


def test_without_arguments_the_usage_is_an_error(capsys):
    assert evaluate([]) == 2
    assert capsys.readouterr().out.startswith("usage: skyasync evaluate")
