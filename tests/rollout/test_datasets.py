"""Rows from files or functions to prompts."""

import json
import logging

import pytest

from skyasync.errors import UserError
from skyasync.rollout.datasets import load_prompts
from tests.rollout.episodes import tokenizer


def rows_of_a_function():
    return [{"prompt": "sort 3 1", "answer": "1 3"}, {"prompt": [{"role": "user", "content": "x"}], "env_class": "own"}]


def no_prompt():
    return [{"prompt": "fine"}, {"question": "x", "answer": 1}]


def fails():
    raise KeyError("inside the user's function")


HERE = "tests.rollout.test_datasets"


def load(*sources, env="default", longest=100):
    return load_prompts(list(sources), env, tokenizer(), longest)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_functions_rows_become_prompts_with_an_identity_and_extras():
    first, second = load(f"{HERE}:rows_of_a_function")
    assert first.messages == [{"role": "user", "content": "sort 3 1"}]
    assert (first.env_class, second.env_class) == ("default", "own")
    assert first.extras == {"answer": "1 3"}
    assert [p.id.row for p in (first, second)] == [0, 1]


def test_json_lines_and_parquet_say_the_same(tmp_path):
    import datasets

    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "reward_spec": {"ground_truth": str(i)}} for i in (0, 1)]
    lines = write(tmp_path / "d.jsonl", rows)
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "d.parquet"))
    assert load(lines) == load(str(tmp_path / "d.parquet"))
    assert load(lines)[1].extras == {"reward_spec": {"ground_truth": "1"}}


def test_sources_are_joined_and_rows_numbered_through(tmp_path):
    lines = write(tmp_path / "d.jsonl", [{"prompt": "q"}])
    assert [p.id.row for p in load(lines, f"{HERE}:rows_of_a_function", lines)] == [0, 1, 2, 3]


def test_prompts_that_are_too_long_are_left_out_and_counted(caplog):
    with caplog.at_level(logging.WARNING):
        kept = load(f"{HERE}:rows_of_a_function", longest=12)
    assert [p.id.row for p in kept] == [1]
    assert "1 of 2 prompts have more than trainer.max_prompt_length=12 tokens" in caplog.text


def test_if_none_is_short_enough_that_is_an_error():
    with pytest.raises(UserError, match=r"trainer\.max_prompt_length=2"):
        load(f"{HERE}:rows_of_a_function", longest=2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.jsonl", "data file 'missing.jsonl' does not exist"),
        ("missing.csv", "neither a .parquet, .jsonl or .json file nor module:function"),
        (f"{HERE}:rows_of_a_functon", "did you mean 'rows_of_a_function'"),
        ("no.such.module:rows", "No module named"),
        (":rows", "must be module:attribute"),
        (f"{HERE}:no_prompt", "data row 1 has no column 'prompt'; it has: question, answer"),
    ],
)
def test_a_wrong_source_or_row_is_refused_by_name(source, message):
    with pytest.raises(UserError, match=message):
        load(source)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    for name in ("bad.jsonl", "bad.parquet"):
        (tmp_path / name).write_text("{not json\n")
        with pytest.raises(UserError, match=name):
            load(str(tmp_path / name))


def test_a_row_without_an_environment_needs_a_default(tmp_path):
    with pytest.raises(UserError, match=r"data row 0 names no env_class and environment\.env_class is empty"):
        load(write(tmp_path / "d.jsonl", [{"prompt": "q"}]), env="")


def test_an_error_in_the_users_function_is_raised_as_it_is():
    with pytest.raises(KeyError, match="inside the user's function"):
        load(f"{HERE}:fails")
