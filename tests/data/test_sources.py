"""Sources of rows: files, folders, data sets by name, procedural tasks, functions."""

import json
import os
import subprocess
import sys

import datasets
import pytest

from skyasync import load_config
from skyasync.data.sources import absolute, rows
from skyasync.errors import UserError

pytestmark = pytest.mark.slow

HERE = "tests.data.test_sources"
ROWS = [
    {"prompt": [{"role": "user", "content": f"q{i}"}], "reward_spec": {"ground_truth": str(i)}}
    for i in (0, 1)
]


def rows_of_a_function():
    return ROWS


def loaded(source, *settings, is_eval=False):
    cfg = load_config(
        ["trainer.policy.model.path=a/b", f"data.train_data={json.dumps([str(source)])}", *settings]
    )
    return [dict(row) for row in rows(str(source), cfg, is_eval=is_eval)]


def write(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def splits():
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_list([{"prompt": name}])
            for name in ("train", "test", "validation")
        }
    )


def test_json_lines_and_parquet_say_the_same(tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "d.parquet"))
    assert loaded(tmp_path / "d.jsonl") == loaded(tmp_path / "d.parquet") == ROWS


def test_rows_that_a_server_reads_again_have_no_entries_of_other_rows(tmp_path):
    given = [
        {
            "responses_create_params": {
                "input": "q",
                "tools": [{"name": name, "parameters": {"properties": {name: {}}}}],
            },
            "metadata": {name: 1},
        }
        for name in ("add", "look_up")
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, given)))
    assert loaded(tmp_path / "d.jsonl") == given
    (tmp_path / "d.jsonl").write_text('{"responses_create_params": {}}\n{')
    with pytest.raises(UserError, match=r"cannot be read: row 1 is not valid JSON"):
        loaded(tmp_path / "d.jsonl")


def test_a_function_of_a_module_and_of_a_file(tmp_path):
    (tmp_path / "helper.py").write_text("TEXT = 'from the helper'\n")
    (tmp_path / "mine.py").write_text(
        "import helper\ndef rows():\n    return [{'prompt': helper.TEXT}]\n"
    )
    assert loaded(f"{HERE}:rows_of_a_function") == ROWS
    assert loaded(f"{tmp_path}/mine.py:rows") == [{"prompt": "from the helper"}]


def test_a_folder_of_files_has_splits_by_their_names(tmp_path):
    write(tmp_path / "set" / "train.jsonl", ["a", "b"])
    write(tmp_path / "set" / "test.jsonl", ["c"])
    assert [row["prompt"] for row in loaded(tmp_path / "set")] == ["a", "b"]
    assert [row["prompt"] for row in loaded(tmp_path / "set", is_eval=True)] == ["c"]
    assert [row["prompt"] for row in loaded(f"{tmp_path}/set:test")] == ["c"]
    assert [row["prompt"] for row in loaded(f"{tmp_path}/set:train[1:]")] == ["b"]


def test_a_saved_data_set(tmp_path, splits):
    splits.save_to_disk(str(tmp_path / "all"))
    splits["test"].save_to_disk(str(tmp_path / "one"))
    assert loaded(tmp_path / "all") == [{"prompt": "train"}]
    assert loaded(tmp_path / "all", is_eval=True) == [{"prompt": "validation"}]
    assert loaded(f"{tmp_path}/all:test") == [{"prompt": "test"}]
    assert loaded(tmp_path / "one") == [{"prompt": "test"}]


def test_a_name_with_configuration_and_split(tmp_path, monkeypatch):
    """The same call loads a folder ``owner/name`` in the layout of a hub's repository."""
    write(tmp_path / "owner" / "name" / "easy.jsonl", ["2 + 2"])
    write(tmp_path / "owner" / "name" / "hard.jsonl", ["x ^ 2 = 2"])
    files = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}.jsonl\n"
        for name in ("easy", "hard")
    )
    (tmp_path / "owner" / "name" / "README.md").write_text(f"---\nconfigs:\n{files}---\n")
    monkeypatch.chdir(tmp_path)
    assert loaded("owner/name#hard:train") == loaded("owner/name#hard") == [{"prompt": "x ^ 2 = 2"}]
    assert loaded("owner/name#easy:train[:1]") == [{"prompt": "2 + 2"}]
    with pytest.raises(UserError, match=r"'owner/name#hrd' cannot be loaded: .*easy.*hard"):
        loaded("owner/name#hrd")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("set:tran", r"set:tran': unknown split 'tran': did you mean 'train'\? allowed: a, train"),
        ("odd", r"odd' has the splits a, b: write .*odd:SPLIT"),
        ("set/trian.jsonl", r"does not exist: did you mean 'train.jsonl'\?"),
        (
            "set.csv",
            r"neither a .parquet, .jsonl or .json file, nor a folder, a Hugging Face data set",
        ),
    ],
)
def test_a_wrong_split_or_file_is_answered_with_the_nearest(tmp_path, source, message):
    for folder, names in (("set", ("a", "train")), ("odd", ("a", "b"))):
        one = datasets.Dataset.from_list([{"prompt": "q"}])
        datasets.DatasetDict(dict.fromkeys(names, one)).save_to_disk(str(tmp_path / folder))
    write(tmp_path / "set" / "train.jsonl", ["q"])
    with pytest.raises(UserError, match=message):
        loaded(tmp_path / source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{HERE}:rows_of_a_functon", "did you mean 'rows_of_a_function'"),
        ("no.such.module:rows", "No module named"),
        (":rows", "must be module:attribute"),
        ("no/such.py:rows", "no/such.py does not exist"),
    ],
)
def test_a_wrong_function_is_refused_by_name(source, message):
    with pytest.raises(UserError, match=message):
        loaded(source)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    for name in ("bad.jsonl", "bad.parquet"):
        (tmp_path / name).write_text("{not json\n")
        with pytest.raises(UserError, match=name):
            loaded(tmp_path / name)


@pytest.mark.matrix
def test_a_hub_out_of_reach_is_one_line():
    program = (
        "from skyasync import load_config, UserError\n"
        "from skyasync.data.sources import rows\n"
        "try: rows('owner/no-such-name', load_config(['trainer.policy.model.path=a/b']), is_eval=False)\n"
        "except UserError as error: print(error)"
    )
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.startswith("data source 'owner/no-such-name' cannot be loaded: ")
    assert ended.stdout.count("\n") == 1


def test_paths_become_absolute_and_names_stay(tmp_path, monkeypatch):
    write(tmp_path / "set" / "train.jsonl", ["a"])
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert absolute("set/train.jsonl") == f"{tmp_path}/set/train.jsonl"
    assert absolute("set:train[:10]") == f"{tmp_path}/set:train[:10]"
    assert absolute("mine.py:rows") == f"{tmp_path}/mine.py:rows"
    for name in ("owner/name#config:split", "reasoning_gym:chain_sum", f"{HERE}:rows"):
        assert absolute(name) == name


# ---------------------------------------------------------------- procedural tasks


def test_a_procedural_tasks_questions_are_its_own():
    import reasoning_gym

    options = [
        f"data.reasoning_gym.chain_sum.{o}"
        for o in ("size=7", "seed=3", "min_terms=2", "max_terms=2")
    ]
    expected = list(
        reasoning_gym.create_dataset("chain_sum", size=7, seed=3, min_terms=2, max_terms=2)
    )
    mine = loaded("reasoning_gym:chain_sum", *options)
    assert [row["prompt"] for row in mine] == [entry["question"] for entry in expected]
    assert [row["label"] for row in mine] == [entry["answer"] for entry in expected]
    assert {(row["env_class"], row["domain"]) for row in mine} == {("reward", "chain_sum")}


def test_held_out_questions_have_a_seed_far_from_the_training_questions():
    sizes = [
        "data.reasoning_gym.chain_sum.size=40",
        "data.reasoning_gym.chain_sum.val_size=40",
        "trainer.seed=5",
    ]
    train, evaluated = (
        loaded("reasoning_gym:chain_sum", *sizes, is_eval=is_eval) for is_eval in (False, True)
    )
    assert len(train) == len(evaluated) == 40
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in evaluated}


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sm", [], r"unknown reasoning_gym task 'chain_sm': did you mean 'chain_sum'"),
        (
            "chain_sum",
            ["max_term=3"],
            r"data.reasoning_gym.chain_sum: unknown option 'max_term': .*'max_terms'",
        ),
        (
            "chain_sum",
            ["min_terms=-1"],
            r"data.reasoning_gym.chain_sum: min_terms must be positive",
        ),
        ("chain_sum", ["min_terms=many"], r"data.reasoning_gym.chain_sum: "),
        ("chain_sum", ["seed=1", "val_seed=2"], r"overlap: set val_seed to 501 or more"),
    ],
)
def test_a_wrong_task_or_option_is_refused(task, options, message):
    with pytest.raises(UserError, match=message):
        loaded(
            f"reasoning_gym:{task}", *(f"data.reasoning_gym.{task}.{option}" for option in options)
        )
