"""The output of ``skyasync evaluate``: each mean with its error over prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from skyasync.cli.evaluate import figure, measure, scores
from skyasync.config.schema import Config
from skyasync.rollout.evaluation import prompt_scores
from skyasync.rollout.types import Group
from tests.full_disk import files_end_at
from tests.rollout.episodes import action, prompt, trajectory


def group(row: int, *rewards: float, eval_set: str = "") -> Group:
    played = [
        trajectory(action([2], reward), row=row, repetition=n) for n, reward in enumerate(rewards)
    ]
    return Group(replace(prompt(row), eval_set=eval_set), played)


def test_a_score_has_the_error_of_its_prompts() -> None:
    groups = [group(0, 1.0, 0.0), group(1, 1.0, 1.0)]
    found = scores(groups, [prompt_scores(each, [1, 2]) for each in groups])
    assert (found["eval/score"], found["eval/pass@1"], found["eval/pass@2"]) == (0.75, 0.75, 1.0)
    assert found["eval/score_error"] == pytest.approx(np.std([0.5, 1.0], ddof=1) / np.sqrt(2))


def test_a_set_has_its_own() -> None:
    groups = [group(0, 1.0), group(1, 1.0, eval_set="aime"), group(2, 0.0, eval_set="aime")]
    found = scores(groups, [prompt_scores(each, [1]) for each in groups])
    assert (found["eval/prompts"], found["eval/aime/prompts"], found["eval/aime/score"]) == (
        3,
        2,
        0.5,
    )
    assert found["eval/aime/score_error"] == pytest.approx(np.std([1.0, 0.0], ddof=1) / np.sqrt(2))


def test_a_metric_that_is_no_number_is_printed_too() -> None:
    assert [figure(value) for value in (16.0, 0.25, float("nan"), float("inf"))] == [
        "16",
        "0.2500",
        "nan",
        "inf",
    ]


def test_a_full_disk_takes_no_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups, tokenizer = [group(0, 1.0, 0.0)], SimpleNamespace(decode=lambda tokens, **_: "text")
    experiment: Any = SimpleNamespace(
        cfg=Config(),
        play=lambda prompts: groups,
        prompts=lambda most: [],
        get_tokenizer=lambda: tokenizer,
    )
    out = (tmp_path / "episodes.jsonl").open("w")
    with files_end_at(10):
        found = measure(experiment, 0, out)
    assert found["eval/score"] == 0.5
    assert capsys.readouterr().err == f"warning: --out {out.name} is incomplete: File too large\n"
