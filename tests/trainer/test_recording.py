"""Samples that a run records: real policy, real engine, every plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyasync.models.images import thumbnail_url
from skyasync.observability.jsonl import read_rows
from skyasync.observability.report.page import page
from skyasync.observability.run_dir import RunDirectory
from skyasync.rollout.trajectory_files import files_of, read
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer
from tests.inference.tiny_llama import save_tiny_llama
from tests.models.tiny_vision import noise
from tests.trainer.plans.local_run import LocalRun, Memory, config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


class Sync(Memory): ...


class Fully(Memory, FullyAsyncRayPPOTrainer): ...


async def trained(
    plan: type[RayPPOTrainer], model: str, folder: Path, **settings: Any
) -> tuple[LocalRun, Path]:
    run = LocalRun(plan, config(model, steps=2, save_samples=3, dump_trajectories=True, **settings))
    run.trainer.context.run_dir = RunDirectory(folder, "run")
    await run.train()
    return run, folder / "run"


@pytest.mark.parametrize("plan", [Sync, Fully], ids=["sync", "fully_async"])
async def test_every_trajectory_that_was_trained_is_there(
    plan: Any, model: str, tmp_path: Path
) -> None:
    run, folder = await trained(plan, model, tmp_path, allow_uncorrected=True)
    found = [read(path) for path in files_of(folder)]
    assert [recorded.groups for recorded in found] == run.trainer.trained
    assert [(recorded.step, recorded.total_steps) for recorded in found] == [(1, 2), (2, 2)]
    consumed = sorted(position for recorded in found for position in recorded.positions)
    assert consumed == list(range(run.trainer.context.progress.position))


async def test_the_trainers_log_probabilities_are_those_of_the_weights_before_the_update(
    model: str, tmp_path: Path
) -> None:
    run, folder = await trained(Sync, model, tmp_path)
    (second,) = [recorded for path in files_of(folder) if (recorded := read(path)).step == 2]
    trajectory, theirs = second.groups[0].trajectories[0], second.trainer_logprobs[0]
    assert theirs is not None
    expected = run.dispatch.score_under(run.trainer.weights[1], trajectory.tokens.tolist())
    start = len(trajectory.segments[0].tokens)
    np.testing.assert_allclose(theirs[start:], expected[start - 1 :], atol=1e-4)


async def test_samples_have_their_tokens(model: str, tmp_path: Path) -> None:
    _, folder = await trained(Sync, model, tmp_path)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    for row in rows:
        tokens = row["tokens"]
        assert len({len(column) for column in tokens.values()}) == 1
        assert set(tokens["versions"]) == {row["step"] - 1}
        gaps = np.subtract(tokens["logprobs"], tokens["trainer_logprobs"])
        assert abs(gaps).max() < 1e-3  # on policy they differ by rounding


async def test_an_evaluation_has_samples_too_and_the_page_shows_their_images(
    model: str, tmp_path: Path
) -> None:
    run, folder = await trained(Sync, model, tmp_path)
    assert {row["step"] for row in read_rows(folder / "eval_samples.jsonl")} == {2}
    assert len(read_rows(folder / "eval_samples.jsonl")) == 3
    group = run.trainer.trained[0][0]
    group = replace(group, prompt=replace(group.prompt, eval_set="discs"))
    group.trajectories[0].segments[0].images = (noise(1),)
    await run.trainer.reporter.evaluated(3, [group])
    row = read_rows(folder / "eval_samples.jsonl")[-1]
    assert row["step"] == 3 and row["eval_set"] == "discs"
    assert row["images"] == [thumbnail_url(noise(1))]
    made = page([folder])
    assert (
        "Samples of evaluations</h2>" in made and f"<span>discs {row['prompt_id']}</span>" in made
    )
    assert f'<img class="shown" src="{row["images"][0]}"' in made


async def test_a_plan_that_trains_in_parts_has_them_all(model: str, tmp_path: Path) -> None:
    _, folder = await trained(StreamedRayPPOTrainer, model, tmp_path)
    for path in files_of(folder):
        assert all(values is not None for values in read(path).trainer_logprobs)
