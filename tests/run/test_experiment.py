"""Decisions of an experiment before any process starts."""

import json
from pathlib import Path

import pytest
from safetensors import serialize

from skyasync.cli.runs import runs
from skyasync.config.model_files import model_path
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.observability.report.settings import read as read_settings
from skyasync.observability.run_dir import unlock_run
from skyasync.rollout.types import Prompt, PromptId
from skyasync.run.experiment import BasePPOExp
from tests.full_disk import files_end_at
from tests.observability.test_run_lock import holder

HERE = __name__
ONE_PROMPT = [Prompt(PromptId(0, 0), [{"role": "user", "content": "x"}], "none")]


class OwnPlan:
    @staticmethod
    def get_trainer(**parts):
        return "mine"


class OwnTokenizer(BasePPOExp):
    def get_tokenizer(self):
        return None


def rows():
    return [{"prompt": "x", "answer": "y"}]


def makes_a_model():
    return "/somewhere/made"


def fails():
    raise ZeroDivisionError("while making it")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "model.path is empty"),
        ("./missing", "neither a local folder nor a Hugging Face name"),
        ("/no/such/folder", "neither a local folder nor a Hugging Face name"),
        ("~/no-such-folder-here", "neither a local folder nor a Hugging Face name"),
        ("a/b/c", "neither a local folder nor a Hugging Face name"),
        ("just-a-word", "neither a local folder nor a Hugging Face name"),
        (f"{__name__}:makes_a_mdel", "did you mean 'makes_a_model'"),
        ("no_such_module:build", "No module named"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_one_line(path, message):
    with pytest.raises(UserError, match=message) as refused:
        model_path(path)
    assert "\n" not in str(refused.value)


def test_a_folder_that_holds_no_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is a folder without config\.json"):
        model_path(str(tmp_path))


def test_a_local_folder_becomes_absolute_since_workers_have_another_working_directory(
    tmp_path, monkeypatch
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        model_path("./model")
        == model_path("model")
        == model_path("~/model")
        == str((tmp_path / "model").resolve())
    )


def test_a_name_of_the_hub_stays_and_a_function_is_called():
    assert (
        model_path("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    assert model_path(f"{__name__}:makes_a_model") == "/somewhere/made"


def test_an_error_of_the_function_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError, match="while making it"):
        model_path(f"{__name__}:fails")


def named_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(serialize({}))
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.trainer.runs_dir, cfg.trainer.run_name = (
        str(tmp_path),
        str(tmp_path),
        "mine",
    )
    cfg.data.train_data, cfg.environment.env_class = [f"{__name__}:rows"], "gsm8k"
    return cfg


def again(tmp_path):
    cfg = named_run(tmp_path)
    cfg.trainer.resume_mode = "latest"
    return cfg


def test_a_run_that_another_command_trains_is_left_as_it_is(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.yaml").write_text("before")
    first = holder(folder)
    try:
        with pytest.raises(UserError, match=rf"mine is in use: process {first.pid} on "):
            OwnTokenizer(again(tmp_path)).prepare()
        assert (folder / "config.yaml").read_text() == "before"
        runs([str(tmp_path)])  # reading asks no question
    finally:
        first.kill()
        first.wait()
    OwnTokenizer(again(tmp_path)).prepare()
    assert "policy" in (folder / "config.yaml").read_text()
    unlock_run(folder)


def test_a_folder_that_cannot_be_written_is_one_line_and_nothing_is_left(tmp_path):
    with (
        files_end_at(100),
        pytest.raises(
            UserError, match=r"^the run's folder .*mine cannot be written: File too large"
        ),
    ):
        OwnTokenizer(named_run(tmp_path)).prepare()
    assert not (tmp_path / "mine").exists()
    cfg = named_run(tmp_path)
    cfg.trainer.run_name = "x" * 300
    with pytest.raises(UserError, match="cannot be written: File name too long"):
        OwnTokenizer(cfg).prepare()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("before")
    with files_end_at(100), pytest.raises(UserError, match="mine cannot be written"):
        OwnTokenizer(again(tmp_path)).prepare()
    assert (tmp_path / "mine" / "config.yaml").read_text() == "before"


def test_preparing_makes_the_runs_folder_with_its_configuration(tmp_path):
    cfg = named_run(tmp_path)
    cfg.trainer.ckpt_path, cfg.trainer.export_path = "checkpoints", "~/export"
    experiment = OwnTokenizer(cfg)
    experiment.prepare()
    assert "policy" in (tmp_path / "mine" / "config.yaml").read_text()
    assert cfg.trainer.ref.model.path == str(tmp_path.resolve())
    recorded = read_settings(tmp_path / "mine" / "config.yaml")
    assert recorded["trainer.ref.model.path"] == "", (
        "also of another policy with which the file is used again"
    )
    assert recorded["trainer.policy.model.path"] == str(tmp_path.resolve())
    assert Path(cfg.trainer.ckpt_path).is_absolute()
    assert cfg.trainer.export_path == str(Path("~/export").expanduser())
    with pytest.raises(UserError, match=r"trainer\.sync_interval cannot be changed any more"):
        experiment.cfg.trainer.sync_interval = 2


@pytest.mark.parametrize(
    ("max_model_len", "turns", "context", "expected"),
    [
        (0, 1, None, 100 + 50),
        (0, 3, None, 3 * (100 + 50)),
        (0, 0, None, 4 * (100 + 50)),
        (0, 0, 400, 400),
        (0, 0, 120, 100 + 50),
        (77, 3, None, 77),
    ],
)
def test_the_engines_longest_sequence_fits_every_turn_unless_it_is_set(
    max_model_len, turns, context, expected, tmp_path
):
    cfg = Config()
    if context:
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
        cfg.trainer.policy.model.path = str(tmp_path)
    cfg.trainer.max_prompt_length, cfg.generator.max_model_len, cfg.generator.max_turns = (
        100,
        max_model_len,
        turns,
    )
    cfg.generator.sampling_params.max_generate_length = 20
    cfg.generator.eval_sampling_params["max_generate_length"] = 50
    assert BasePPOExp(cfg).engine_config().max_model_len == expected


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        ("sync", "RayPPOTrainer"),
        ("one_step_off", "AsyncRayPPOTrainer"),
        (f"{__name__}:OwnPlan", "mine"),
    ],
)
def test_the_plan_is_chosen_by_name_or_reference(plan, name):
    cfg = Config()
    cfg.trainer.plan = plan
    parts = dict.fromkeys(
        ["tracker", "tokenizer", "eval_dataset", "inference_engine_client", "generator"]
    )
    trainer = BasePPOExp(cfg).get_trainer(cfg, train_dataset=ONE_PROMPT, colocate_pg=None, **parts)
    assert (trainer if name == "mine" else type(trainer).__name__) == name


def test_sleeping_engines_are_refused_where_vllm_cannot_sleep():
    cfg = Config()
    cfg.trainer.placement.colocate_all = True
    experiment = BasePPOExp(cfg)
    cfg.generator.backend = "vllm"
    with pytest.raises(UserError, match=r"colocate_all=true.*generator\.backend=transformers"):
        experiment.engine_config()
    experiment.gpus = True
    assert experiment.engine_config().extra["sleep_mode"]
    cfg.generator.backend, experiment.gpus = "transformers", False
    assert experiment.engine_config().extra["sleep_mode"]
    cfg.trainer.placement.colocate_all = False
    assert not experiment.engine_config().extra["sleep_mode"]


def test_an_unknown_plan_is_refused_with_the_nearest():
    cfg = Config()
    cfg.trainer.plan = "one_step"
    with pytest.raises(UserError, match="one_step_off"):
        BasePPOExp(cfg).get_trainer(cfg, None, None, ONE_PROMPT, None, None, None, None)
