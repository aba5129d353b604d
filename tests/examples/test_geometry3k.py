"""examples/geometry3k on rows with the data set's columns: Hugging Face's encoded images, and ``<image>`` in a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageColumn

import examples
from skyasync import BasePPOExp, load_config
from skyasync.data.datasets import load_prompts
from skyasync.models.images import images_of
from skyasync.models.vision import decoded
from skyasync.rewards import REWARDS
from skyasync.rollout.tokenizer import load_tokenizer
from tests.end_to_end.runs import read_lines
from tests.models.tiny_vision import noise, save_tiny

pytestmark = pytest.mark.slow

CONFIG = Path(examples.__file__).parent / "geometry3k" / "config_gpus.yaml"
COLUMNS = Features(
    {"images": List(ImageColumn()), "problem": Value("string"), "answer": Value("string")}
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides: a tiny model, and the data as the hub's parquet files."""
    folder = tmp_path_factory.mktemp("geometry3k")
    rows = [
        {
            "images": [decoded(noise(i, 56 + 28 * (i % 3), 56))],
            "problem": f"<image>Find x, if AB = {i}.",
            "answer": f"{i} \\sqrt {{ 2 }}",
        }
        for i in range(1, 9)
    ]
    Dataset.from_list(rows, features=COLUMNS).to_parquet(folder / "train.parquet")
    model = save_tiny("qwen2_5_vl", folder / "model")
    data = [f"data.{name}=[{folder / 'train.parquet'}]" for name in ("train_data", "val_data")]
    return ["--config", str(CONFIG), f"trainer.policy.model.path={model}", *data]


def test_its_rows_are_prompts_with_their_images_and_a_judge(files: list[str]) -> None:
    cfg = load_config(files)
    prompts = load_prompts(cfg.data.train_data, cfg, load_tokenizer(cfg.trainer.policy.model.path))
    assert len(prompts) == 8
    system, user = prompts[1].messages
    assert system["content"] == "Reason step by step, and put the final answer in \\boxed{}."
    assert [part["type"] for part in user["content"]] == ["image", "text"]
    (image,) = images_of(prompts[1].messages)
    assert decoded(image).size == (112, 56)
    assert decoded(image).tobytes() == decoded(noise(2, 112, 56)).tobytes()
    judge: Any = REWARDS.get("math_verify")
    answers = {
        "x is \\boxed{2\\sqrt{2}}": 1.0,
        "x is \\boxed{\\sqrt{8}}": 1.0,
        "x is \\boxed{2}": 0.0,
    }
    assert {
        answer: judge(answer, label=prompts[1].extras["label"]) for answer in answers
    } == answers


@pytest.mark.matrix
def test_the_configuration_trains_two_steps_on_this_machine(
    ray_session: None, files: list[str], tmp_path: Path
) -> None:
    smaller = [
        "generator.backend=transformers", "generator.num_inference_engines=1", "generator.threads=1",
        "trainer.placement.policy_num_gpus_per_node=1", "trainer.policy.threads=1", "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4", "trainer.max_training_steps=2", "trainer.eval_interval=0",
        "trainer.max_prompt_length=300", "generator.sampling_params.max_generate_length=8",
        f"trainer.runs_dir={tmp_path}", "trainer.run_name=run", "trainer.terminal=lines", "trainer.report=false",
        "generator.verify_interval=1",
    ]  # fmt: skip
    BasePPOExp(load_config([*files, *smaller])).run()
    steps = [row for row in read_lines(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert len(steps) == 2
    assert all(row["sync/logprob_gap"] < 1e-5 for row in steps)
