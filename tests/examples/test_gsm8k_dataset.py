import json
import os
from pathlib import Path

import pytest
from datasets import load_dataset

from examples.gsm8k.gsm8k_dataset import prepare
from skyasync import load_config
from skyasync.data.datasets import load_prompts
from skyasync.envs import env_factory
from skyasync.errors import UserError
from skyasync.examples.tiny.model import Recipe

TRAIN = [
    {
        "question": "How many are 1,000 and 72?",
        "answer": "1000+72=<<1000+72=1072>>1072.\n#### 1,072",
    }
]
TEST = [{"question": "What is 2 less than 1?", "answer": "It is -1.\n#### -1"}]


@pytest.fixture
def source(tmp_path):
    for name, rows in (("train", TRAIN), ("test", TEST)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def _rows(file: Path) -> list[dict]:
    return list(load_dataset("parquet", data_files=str(file), split="train"))


def test_rows_have_the_question_its_judge_and_the_final_number(source, tmp_path):
    files = prepare(tmp_path / "out", source)
    assert [file.name for file in files.values()] == ["train.parquet", "validation.parquet"]
    (row,) = _rows(files["train"])
    assert row["prompt"][0]["role"] == "user"
    assert row["prompt"][0]["content"].startswith(TRAIN[0]["question"])
    assert row["env_class"] == "gsm8k"
    assert row["reward_spec"] == {"method": "rule", "ground_truth": "1072"}
    assert row["extra_info"] == {"split": "train", "index": 0, **TRAIN[0]}
    (row,) = _rows(files["validation"])
    assert row["reward_spec"]["ground_truth"] == "-1"


def test_solution_without_a_final_number_is_refused(source, tmp_path):
    (source / "test.jsonl").write_text(
        json.dumps({"question": "?", "answer": "Nobody knows."}) + "\n"
    )
    with pytest.raises(UserError, match="validation row 0: no number after '####'"):
        prepare(tmp_path / "out", source)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"train\.jsonl: no such file"):
        prepare(tmp_path / "out", tmp_path)


@pytest.mark.slow
def test_every_reference_solution_of_the_real_data_set_earns_the_reward(tmp_path):
    if not os.environ.get("SKYASYNC_GSM8K"):
        pytest.skip("SKYASYNC_GSM8K names no folder with GSM8K's train.jsonl and test.jsonl")
    files = prepare(tmp_path, Path(os.environ["SKYASYNC_GSM8K"]))
    for name, count in (("train", 7473), ("validation", 1319)):
        cfg = load_config(["trainer.policy.model.path=a/b", "trainer.max_prompt_length=10000"])
        prompts = load_prompts([str(files[name])], cfg, Recipe().make_tokenizer())
        assert len(prompts) == count
        for prompt in prompts:
            env = env_factory(prompt.env_class)({}, prompt.extras)
            assert env.step(prompt.extras["extra_info"]["answer"])["reward"] == 1.0
