"""``skyasync evaluate``: errors before anything starts."""

from contextlib import ExitStack

import pytest

from skyasync.cli.commands import SUBCOMMANDS
from skyasync.cli.evaluate import _settings_of, evaluate
from skyasync.cli.export import find_checkpoint
from skyasync.cli.replay import _checkpoint
from skyasync.errors import UserError
from skyasync.utils import manifest


def test_a_run_that_is_not_there_is_named_and_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"--of runs/frist: there is no such run, .*: did you mean runs/first"
    ):
        evaluate(["--of", "runs/frist"])


def test_without_arguments_the_usage_is_an_error(capsys):
    assert SUBCOMMANDS["evaluate"].carry_out([]) == 2
    assert capsys.readouterr().err.startswith("usage: skyasync evaluate")


def test_checkpoints_of_a_run_are_where_its_settings_have_put_them(tmp_path, monkeypatch):
    run, checkpoint = tmp_path / "run", tmp_path / "disk" / "step_000003"
    for folder in (run, checkpoint):
        folder.mkdir(parents=True)
    (run / "config.yaml").write_text(f"trainer:\n  ckpt_path: {checkpoint.parent}\n")
    (checkpoint / "state.json").write_text('{"step": 3}')
    manifest.write(checkpoint, {"state.json": manifest.sum_of(checkpoint / "state.json")})
    monkeypatch.setattr("skyasync.cli.export.write", lambda *_: None)
    assert find_checkpoint(str(run)) == _checkpoint(run, 3) == checkpoint
    with ExitStack() as stack:
        assert _settings_of(str(run), stack, best=False)[:2] == [
            "--config",
            str(run / "config.yaml"),
        ]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--best"], "--best needs the run whose best checkpoint is meant: --of runs/NAME"),
        (
            ["--best", "--of", "owner/model"],
            "--best chooses among the checkpoints of a run, and owner/model is a model",
        ),
        (["--of", "run"], "run has no checkpoint: a run with trainer.ckpt_interval keeps some"),
    ],
)
def test_what_has_no_best_checkpoint_or_none_at_all_is_named(argv, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("trainer:\n  seed: 1\n")
    with pytest.raises(UserError, match=line):
        evaluate(argv)
