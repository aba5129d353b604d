"""``skyasync sft``: real ranks, their losses, resuming, and reinforcement learning from its model."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyasync.__main__ import command
from skyasync.cli.sft import SupervisedExperiment, check_settings
from skyasync.config import load_config
from skyasync.config.schema import AlgorithmConfig
from skyasync.data.demonstrations import load_demonstrations
from skyasync.examples.tiny.model import build
from skyasync.examples.tiny.tasks import demonstrations as tiny_demonstrations
from skyasync.examples.tiny_models import SFTSteps, fine_tune
from skyasync.models.images import data_url
from skyasync.observability.run_dir import unlock_run
from skyasync.rollout.tokenizer import load_tokenizer
from skyasync.rollout.types import images_in
from tests.end_to_end.runs import Trained, arguments
from tests.models.tiny_vision import noise, prompt, save_tiny
from tests.trainer.test_supervised import demonstrations, plain, settings

BATCH, STEPS = 6, 4
WARM_UP = (
    "trainer.policy.optimizer_config.lr=2e-3", "trainer.policy.optimizer_config.num_warmup_steps=20",
    "trainer.policy.optimizer_config.scheduler=constant", "trainer.policy.optimizer_config.weight_decay=0",
)  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    small = {
        "hidden": 64,
        "head_dim": 32,
        "intermediate": 128,
        "batch_size": 8,
        "steps": 1,
        "corpus_size": 512,
    }
    return build(
        out=tmp_path_factory.mktemp("models") / "tied", progress=False, rarest_merge=20, **small
    )


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in demonstrations()))
    return file


def learn(folder: Path, model: str, data: Path, name: str, *more: str) -> Trained:
    given = [
        f"trainer.policy.model.path={model}", f"data.train_data={data}", f"trainer.runs_dir={folder}",
        f"trainer.run_name={name}", f"trainer.train_batch_size={BATCH}", f"trainer.max_training_steps={STEPS}",
        "trainer.policy.optimizer_config.lr=3e-3", "trainer.policy.optimizer_config.scheduler=linear",
        "trainer.policy.optimizer_config.weight_decay=0.01", "trainer.policy.threads=1", "trainer.terminal=lines",
        "trainer.report=false", "trainer.eval_before_train=false",
    ]  # fmt: skip
    command(["sft", *given, *more])
    return Trained(folder / name)


@pytest.fixture(scope="module")
def whole(
    ray_session: None, model: str, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """On two ranks."""
    ranks = "trainer.placement.policy_num_gpus_per_node=2"
    return learn(tmp_path_factory.mktemp("runs"), model, data, "whole", ranks, "trainer.ckpt_interval=2",
                 "trainer.ckpt_keep=0")  # fmt: skip


@pytest.mark.slow
def test_two_ranks_have_the_loss_of_a_plain_loop_at_every_step(whole: Trained, model: str) -> None:
    from skyasync.data.prompts import PromptStream
    from skyasync.rollout.types import Prompt, PromptId

    rows, cfg = demonstrations(), settings(model)
    stream = PromptStream(
        [Prompt(PromptId(0, n), [], "") for n in range(len(rows))], BATCH, 42, BATCH * STEPS
    )
    order = [stream.prompt(n).id.row for n in range(BATCH * STEPS)]
    assert whole.series("sft/loss") == pytest.approx(plain(model, cfg, order, rows), abs=1e-6)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_resumed_run_makes_the_very_same_updates(whole: Trained, model: str, data: Path) -> None:
    checkpoint = whole.folder / "checkpoints" / "step_000002"
    again = learn(whole.folder.parent, model, data, "again", "trainer.placement.policy_num_gpus_per_node=2",
                  f"trainer.resume_mode={checkpoint}")  # fmt: skip
    assert [row["step"] for row in again.metrics] == [3, 4]
    for name in ("sft/loss", "policy/grad_norm"):
        assert again.series(name) == whole.series(name)[2:], name
    first, second = (
        (run.folder / "model" / "model.safetensors").read_bytes() for run in (whole, again)
    )
    assert first == second


@pytest.mark.matrix
@pytest.mark.slow
def test_reinforcement_learning_starts_from_the_written_model(whole: Trained) -> None:
    folder = whole.folder.parent
    command(["train", *arguments("trainer.max_training_steps=2", "trainer.run_name=rl", runs=folder,
                                 model=str(whole.folder / "model"))])  # fmt: skip
    assert [row["step"] for row in Trained(folder / "rl").metrics] == [1, 2]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"prompt": "q", "answer": "a"}, "data row 0 has no response: it needs the column completion (or response) "
                                         "next to 'prompt', or messages; it has: prompt, answer"),
        ({"completion": "a"}, "data row 0 has no column 'prompt' (data.prompt_key)"),
        ({"prompt": "q", "completion": "a", "image": "x.png"}, "data row 0: the image 'x.png' cannot be read"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]},
                       {"role": "assistant", "content": "a"}]}, "data row 0: the image 'x.png' cannot be read"),
        ({"prompt": "q", "completion": "a", "videos": ["x.mp4"]}, "data row 0: the row has videos: images are read"),
        ({"prompt": "q", "completion": 3}, "data row 0: 'completion' must be a string"),
        ({"messages": [{"role": "user", "content": "q"}]}, "must have a message of the role 'assistant', after"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "must have a message of the role 'assistant', after"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_one_line(
    row: dict[str, Any], line: str, model: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(SystemExit) as ended:
        learn(tmp_path, model, file, "run")
    assert ended.value.code == 2
    (error,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error:")]
    assert line in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "generator.n_samples_per_prompt=8",
            "generator.n_samples_per_prompt has no effect with skyasync sft",
        ),
        (
            "environment.reward_funcs=[exact_match]",
            "environment.reward_funcs has no effect with skyasync sft",
        ),
        (
            "trainer.algorithm.use_kl_loss=true",
            "trainer.algorithm.use_kl_loss has no effect with skyasync sft",
        ),
        ("trainer.max_staleness=1", "trainer.max_staleness"),
        ("--dry-run", "unknown option --dry-run"),
    ],
)
def test_a_setting_without_effect_is_one_line(
    setting: str, line: str, model: str, data: Path, tmp_path: Path, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        learn(tmp_path, model, data, "run", setting)
    assert ended.value.code == 2
    assert line in capsys.readouterr().err


def test_the_settings_that_a_run_writes_repeat_it_and_are_those_of_its_evaluation(
    model: str, data: Path, tmp_path: Path
) -> None:
    given = [f"trainer.policy.model.path={model}", f"data.train_data={data}", f"trainer.runs_dir={tmp_path}",
             "trainer.run_name=run", "generator.sampling_params.max_generate_length=9"]  # fmt: skip
    experiment = SupervisedExperiment(load_config(given))
    experiment.prepare()
    unlock_run(tmp_path / "run")
    again = load_config(["--config", str(tmp_path / "run" / "config.yaml")])
    check_settings(again)
    assert again.generator.sampling_params.max_generate_length == 9
    assert (
        again.generator.num_inference_engines == 1 and again.trainer.algorithm == AlgorithmConfig()
    )
    assert SupervisedExperiment(again).cfg.trainer.algorithm == experiment.cfg.trainer.algorithm


@pytest.mark.matrix
@pytest.mark.slow
def test_demonstrations_with_images_are_learned(ray_session: None, tmp_path: Path) -> None:
    """One answer for each of two images, to the same question."""
    model, file = save_tiny("qwen3_vl", tmp_path / "model"), tmp_path / "rows.jsonl"
    urls = [data_url(noise(i)) for i in range(3)]
    rows = [
        {"prompt": "How many discs?", "images": [urls[i % 2]], "completion": str(i % 2)}
        for i in range(24)
    ]
    part = {"type": "image_url", "image_url": {"url": urls[2]}}
    later = {"role": "user", "content": [part, {"type": "text", "text": "How many discs?"}]}
    turns = [
        {"role": "user", "content": "<image>How many discs?"},
        {"role": "assistant", "content": "1"},
    ]
    whole = {"messages": [*turns, later, turns[1]], "images": [urls[1]]}
    (read,) = load_demonstrations(
        ["x"], settings(model), load_tokenizer(model), loaded_rows={"x": [whole]}
    )
    (segments,) = read.sequences
    assert [segment.images for segment in segments] == [(noise(1),), (), (noise(2),), ()]
    assert len(segments[0].tokens) == len(prompt(model, (noise(1),)))
    assert images_in(segments) == (noise(1), noise(2))

    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = learn(tmp_path, model, file, "run", "trainer.max_training_steps=12", "trainer.max_prompt_length=64",
                "trainer.policy.optimizer_config.lr=1e-2", "trainer.train_batch_size=8")  # fmt: skip
    losses = run.series("sft/loss")
    assert losses[-1] < 0.2 < losses[0], "without the images it stays above ln 2 / 2 = 0.35"


@pytest.mark.slow
def test_the_tiny_models_warm_start_is_the_commands(ray_session: None, tmp_path: Path) -> None:
    """Of rows that are one batch: the command shuffles them."""
    small: dict[str, Any] = {
        "hidden": 64,
        "head_dim": 32,
        "intermediate": 128,
        "corpus_size": 512,
        "rarest_merge": 20,
    }
    start = build(out=tmp_path / "start", progress=False, steps=0, **small)
    rows = tiny_demonstrations(BATCH)
    fine_tune(Path(start), tmp_path / "made", cycle(rows), SFTSteps(STEPS, BATCH, lr=2e-3))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    trained = learn(tmp_path, start, data, "run", f"trainer.epochs={STEPS}", *WARM_UP)
    found, expected = (
        load_file(folder / "model.safetensors")
        for folder in (trained.folder / "model", tmp_path / "made")
    )
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-6, rtol=0)
