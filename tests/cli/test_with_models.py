"""rollout, evaluate, export and replay on a really trained run: each takes a few seconds of real parts."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyasync import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.__main__ import command
from skyasync.cli.export import write
from skyasync.errors import UserError
from skyasync.examples.tiny.model import build
from skyasync.observability.metric_names import entry_of
from tests.end_to_end.runs import Trained, arguments, read_lines, train_in

pytestmark = pytest.mark.slow  # they share a run that is really trained

VAL = "data.val_data=tests.end_to_end.parts:train_prompts"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    small = {
        "hidden": 64,
        "head_dim": 32,
        "intermediate": 128,
        "batch_size": 64,
        "steps": 20,
        "tasks": ("sort",),
    }
    return build(out=tmp_path_factory.mktemp("models") / "tied", progress=False, tied=True, **small)


@pytest.fixture(scope="module")
def run(ray_session: None, model: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Three recorded steps; the last one has a checkpoint and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("recorded")
    return train_in(folder, model)(
        "trainer.max_training_steps=3", "trainer.dump_trajectories=true", "trainer.ckpt_interval=3",
        "trainer.ckpt_best_metric=reward/mean", f"trainer.export_path={folder / 'final'}", "trainer.report=true",
    )  # fmt: skip


def test_a_replay_makes_the_very_same_updates(run: Trained) -> None:
    command(["replay", str(run.folder), "trainer.report=false"])
    again = Trained(run.folder.with_name("run-replay"))
    for name in (
        "policy/loss",
        "policy/grad_norm",
        "policy/lr",
        "off_policy/ratio_max",
        "staleness/mean",
    ):
        assert again.series(name) == run.series(name), name


@pytest.mark.matrix
def test_a_replay_may_change_what_is_learnt_from_the_same_samples(run: Trained) -> None:
    command(
        [
            "replay",
            str(run.folder),
            "trainer.policy.optimizer_config.lr=0",
            "trainer.run_name=still",
        ]
    )
    still = Trained(run.folder.with_name("still"))
    assert still.series("reward/mean") == run.series("reward/mean")
    assert still.series("policy/lr") == [0.0] * 3
    assert still.series("policy/loss")[2] != run.series("policy/loss")[2]


def test_a_run_leaves_its_page_and_its_status(run: Trained) -> None:
    page = (run.folder / "report.html").read_text()
    assert "finished</span>" in page and "engine -" in page  # its tokens are there
    assert json.loads((run.folder / "status.json").read_text())["state"] == "finished"


def test_an_export_is_the_policy_of_the_checkpoint(
    run: Trained, tmp_path: Path, capsys: Any
) -> None:
    command(["export", str(run.folder), f"--out={tmp_path / 'hf'}", "--dtype", "float32"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "hf")
    made, final = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (tmp_path / "hf", run.folder.parent / "final")
    )
    assert made.keys() == final.keys()
    assert all(torch.equal(made[name], final[name]) for name in made)


def test_an_export_replaces_nothing(run: Trained, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is there and not empty: name another folder with --out"):
        write(run.folder / "checkpoints" / "step_000003", tmp_path)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["export", "runs/nowhere"],
            "there is no folder runs/nowhere: name a checkpoint's, or a run's that has some",
        ),
        (
            ["export", "{run}", "--dtype=int8"],
            "unknown --dtype 'int8': allowed: auto, bfloat16, float32",
        ),
        (["export", "{run}", "--ouf=x"], "unknown option --ouf: did you mean --out?"),
        (["evaluate", "--of={run}", "--k", "0"], "--k 0: not a whole number of at least 1"),
        (
            ["evaluate", "--of={run}", "--k", "4", VAL],
            "--k 4 needs as many samples: set generator.eval_n_samples_per_",
        ),
        (
            ["evaluate", "--of={run}", VAL, "--out=/no/such"],
            "--out /no/such cannot be written: No such file",
        ),
        (["evaluate", "--of={run}"], "there are no held-out prompts: name data.val_data"),
        (["replay", "{run}", "--tokens"], "--tokens is read with --show"),
        (["replay", "{run}/checkpoints"], "is not a run's folder: it has no config.yaml"),
        (["replay", "{run}", "--show", "--episode", "e9"], "has recorded no episode e9"),
        (["rollout", "--prompts", "some"], "--prompts some: not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_one_line(
    argv: list[str], line: str, run: Trained, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        command([argument.replace("{run}", str(run.folder)) for argument in argv])
    assert ended.value.code == 2
    assert line in capsys.readouterr().err


def test_a_checkpoint_is_evaluated_with_its_runs_settings(
    run: Trained, tmp_path: Path, capsys: Any
) -> None:
    sampled = [
        "generator.eval_n_samples_per_prompt=4",
        "generator.eval_sampling_params.temperature=null",
    ]
    command(["evaluate", f"--of={run.folder}", "--best", "--prompts=6", "--json", "--passing=0.5", VAL, *sampled,
             f"--out={tmp_path / 'samples.jsonl'}"])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert found["eval/prompts"] == 6
    assert 0 <= found["eval/pass@1"] <= found["eval/pass@2"] <= found["eval/pass@4"] <= 1
    assert found["eval/score_error"] >= 0
    episodes = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(episodes) == 6 * 4
    assert sum(episode["reward"] for episode in episodes) / 24 == pytest.approx(found["eval/score"])


def test_prompts_are_played_without_a_run_folder(
    ray_session: None, model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [
        s for s in arguments(runs=tmp_path / "runs", model=model) if "n_samples_per_prompt" not in s
    ]
    command(["rollout", "--prompts", "2", "--samples=3", "--json", *settings])
    episodes = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    assert [episode["id"] for episode in episodes] == [
        f"e0-i{row}-r{n}" for row in (0, 1) for n in range(3)
    ]
    assert all(episode["segments"][0]["kind"] == "prompt" for episode in episodes)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("subcommand", ["rollout", "evaluate"])
def test_an_environment_that_raises_is_one_line_that_names_the_episode_and_where_the_traceback_is(
    subcommand: str,
    ray_session: None,
    model: str,
    tmp_path: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = arguments(
        f"environment.env_class={__name__}:Unfinished", VAL, runs=tmp_path / "runs", model=model
    )
    with pytest.raises(SystemExit) as ended:
        command([subcommand, "--prompts=2", *settings])
    assert ended.value.code == 1
    shown = capfd.readouterr()
    assert (
        "Traceback" not in shown.out + shown.err and "Loading weights" not in shown.out + shown.err
    )
    last = shown.err.splitlines()[-1]
    found = re.fullmatch(
        r"error: NotImplementedError: to be written, while playing the episode \S+-i\d+-r\d+ "
        r"\(the traceback: (\S+)/error.txt(; logs: \1/logs)?\)",
        last,
    )
    assert found, last
    assert "raise NotImplementedError" in Path(found[1], "error.txt").read_text()


class Unfinished(BaseTextEnv):
    def step(self, action: str) -> BaseTextEnvStepOutput:
        raise NotImplementedError("to be written")


def test_prompts_are_shown_without_starting_anything(
    model: str, tmp_path: Path, capsys: Any
) -> None:
    command(["rollout", "--show-prompts", "--prompts=1", *arguments(runs=tmp_path, model=model)])
    out = capsys.readouterr().out
    assert "<|im_start|>user" in out and "tokens" in out


def test_episodes_are_shown_token_by_token(run: Trained, capsys: Any) -> None:
    command(["replay", str(run.folder), "--show", "--step", "2", "--tokens"])
    out = capsys.readouterr().out
    assert "step 2" in out and "versions  1" in out and "engine" in out
    command(["replay", str(run.folder), "--show"])
    assert "step 3" in capsys.readouterr().out


def test_without_recorded_trajectories_the_samples_are_shown(
    run: Trained, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "config.yaml").write_text((run.folder / "config.yaml").read_text())
    rows = read_lines(run.folder / "samples.jsonl")
    for row in rows:
        row["tokens"]["text"][0] = "\x1b]0;title\x07 \x1b[2J and \x9b2J, on\n\ttwo lines"
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command(["replay", str(tmp_path), "--show"])
    out = capsys.readouterr().out
    assert "step 3" in out and "]0;title" in out and "two lines" in out
    assert not {"\x1b", "\x07", "\x9b"} & set(out), "a terminal would carry them out"
    with pytest.raises(SystemExit):
        command(["replay", str(tmp_path)])
    assert (
        "has recorded no trajectories (trainer.dump_trajectories=true)" in capsys.readouterr().err
    )


def test_every_metric_of_a_run_stands_in_the_reference(run: Trained) -> None:
    names = {name for row in read_lines(run.folder / "metrics.jsonl") for name in row}
    assert len(names) > 40
    assert sorted(name for name in names if entry_of(name) is None) == []


def test_what_a_run_wrote_has_its_tokens(run: Trained) -> None:
    assert all(
        "trainer_logprobs" in row["tokens"] for row in read_lines(run.folder / "samples.jsonl")
    )
