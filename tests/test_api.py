"""Training from Python: a wrong argument is rejected before anything starts, and nothing stays registered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from skyasync import EarlyStopping, TrainResult, UserError, evaluate, rollouts, train
from skyasync.api import EVALUATION, _configured, _of_recipe
from skyasync.cli.train import configuration
from skyasync.registry import user_parts
from skyasync.run.experiment import BasePPOExp

ROWS = [{"prompt": "1+1", "answer": "2"}]


def right(response: str, answer: str) -> float:
    return float(response == answer)


@pytest.fixture(autouse=True)
def never_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(self: BasePPOExp) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(BasePPOExp, "run", run)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "settings", [{"trainer.train_batch_sise": 8}, {"trainer": {"train_batch_sise": 8}}]
)
@pytest.mark.parametrize("call", [train, evaluate, rollouts])
def test_a_wrong_key_is_rejected_with_the_nearest(
    call: Callable[..., Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(
        UserError, match=r"train_batch_sise.*did you mean trainer\.train_batch_size\?"
    ):
        call(prompts=ROWS, reward=right, settings=settings)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"settings": {"trainer.train_batch_size": "many"}}, "trainer.train_batch_size: .*'many'"),
        ({"settings": {"trainer.train_batch_size": 0}}, "trainer.train_batch_size=0"),
        ({"settings": {"environment.env_config": {"best": right}}}, "environment.env_config=.*: a setting is a number"),
        ({"steps": 3, "settings": {"trainer": {"max_training_steps": 4}}}, "trainer.max_training_steps is set twice"),
        ({"plan": "one_step_of"}, "one_step_off"),
        ({"tracker": "tensorbord"}, "tensorboard"),
        ({"reward": right, "environment": "gsm8k"}, "reward and environment are both given"),
        ({"reward": 3}, "reward must be a function or a name, or several; found 3"),
        ({"reward": [right, None]}, "reward must be a function .*found None"),
        ({"reward": {42: 1.0}}, "reward must be a function .*found 42"),
        ({"environment": 42}, "42 is no environment: pass a name, a class or a function"),
        ({"plan": 42}, "42 is no "),
        ({"tracker": 42}, "42 is no tracker"),
        ({"prompts": {"train": ROWS, "test": ROWS}}, "found dict with train, test: pass one of its splits"),
        ({"prompts": 3}, "prompts must be rows, a path or a function; found int"),
        ({"prompts": ROWS, "steps": 1, "settings": {"data.streaming": True}}, "prompts must be a path or module"),
        ({"callbacks": [EarlyStopping]}, r"callback EarlyStopping is a class: pass an object, EarlyStopping\(\)"),
        ({"callbacks": EarlyStopping("eval/score")}, "callbacks must be a list of skyasync.TrainerCallback objects"),
        ({"callbacks": [right]}, "callback function must be a subclass of skyasync.TrainerCallback"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_error(arguments: dict[str, Any], problem: str) -> None:
    before = user_parts()
    with pytest.raises(UserError, match=problem):
        train(
            **{
                "prompts": ROWS,
                "reward": None if "environment" in arguments else right,
                **arguments,
            }
        )
    assert user_parts() == before
    assert list(Path.cwd().iterdir()) == []


def test_the_engine_of_a_run_is_made_again_from_its_own_settings_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {
        "trainer.policy.model.dtype": "bfloat16", "generator.max_turns": 2, "data.system_prompt": "Be brief.",
        "trainer.max_prompt_length": 2000, "generator.sampling_params.frequency_penalty": 0.5,
    }  # fmt: skip
    settings = {
        **kept, "trainer": {"max_staleness": 2, "policy": {"model": {"path": "m"}}}, "data.val_data": "x",
        "trainer.tracker": "x", "generator.agent_program": "agent.py:run", "generator.turn_discount": 0.9,
        "generator.tool_parser": "mistral", "trainer.placement.colocate_policy_critic": False,
    }  # fmt: skip
    asked = _asked_of_engines(monkeypatch, settings, ["1+1"])
    fixed = {
        "generator.backend": "transformers",
        "generator.eval_n_samples_per_prompt": 1,
        "trainer.algorithm.off_policy_correction": "none",
    }
    assert asked == kept | fixed


def test_the_transformers_engine_answers_unless_the_run_chose_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        _asked_of_engines(monkeypatch, {"generator.max_num_seqs": 8}, ["1+1"])["generator.backend"]
        == "transformers"
    )
    # vLLM need not be installed: the settings are not checked.
    monkeypatch.setitem(globals(), "_configured", lambda *arguments: nullcontext())
    for chosen in (
        {"generator.backend": "vllm"},
        {"generator.engine_kwargs": {"enforce_eager": True}},
        {"generator.sampling_params.structured_outputs": {"regex": "[0-9]+"}},
    ):
        assert (
            _asked_of_engines(monkeypatch, chosen, ["1+1"]).get("generator.backend", "vllm")
            == "vllm"
        )


def test_empty_text_is_a_value() -> None:
    with _configured(
        None, {}, None, None, {}, {"data.system_prompt": "", "environment.env_config": {"a": ""}}
    ) as (
        cfg,
        _,
    ):
        assert cfg.data.system_prompt == "" and cfg.environment.env_config == {"a": ""}


def test_the_engine_of_the_tiny_example_samples_as_its_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {
        **_of_recipe(configuration([])),
        "generator": {"sampling_params": {"max_generate_length": 12}},
    }
    asked = _asked_of_engines(monkeypatch, settings, ["Sort: 21"])
    assert asked["generator.sampling_params.max_generate_length"] == 12
    assert asked["generator.eval_sampling_params"]["temperature"] is None, "as in training"
    assert asked["trainer.max_prompt_length"] == 32
    assert (
        _of_recipe(
            configuration(["trainer.policy.model.path=owner/model", "data.train_data=rows.jsonl"])
        )
        == {}
    )


def test_a_prompt_that_the_run_would_leave_out_is_an_error_and_moves_no_other_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        UserError,
        match=r"1 of 2 prompts have more tokens than the run's trainer\.max_prompt_length",
    ):
        _asked_of_engines(monkeypatch, {}, ["long " * 1000, "1+1"], left_out=1)


def _asked_of_engines(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], prompts: list[str], left_out: int = 0
) -> dict[str, Any]:
    """The settings with which a result's engine is made, which a run may have."""
    asked: dict[str, Any] = {}

    def episodes(
        model: Path,
        rows: list[dict[str, Any]],
        reward: str,
        *,
        settings: dict[str, Any],
        evaluation: bool,
    ) -> list[dict[str, Any]]:
        asked.update(settings)
        with _configured(model, {EVALUATION: rows}, reward, None, {}, settings):
            return [{"response": "2"} for _ in rows[left_out:]]

    monkeypatch.setattr("skyasync.api.rollouts", episodes)
    TrainResult({}, [], Path("a"), Path("a/model"), None, settings).generate(prompts)
    return asked


def test_the_metrics_that_become_the_history_are_written_with_any_trackers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = []
    monkeypatch.setattr(
        BasePPOExp, "__init__", lambda self, cfg: chosen.append(cfg.trainer.logger) or 1 / 0
    )
    for trackers in (["console"], ["console", "jsonl"]):
        with pytest.raises(ZeroDivisionError):
            train(settings={"trainer.logger": trackers})
    assert chosen == [["jsonl", "console"], ["console", "jsonl"]]


def test_a_history_is_a_data_frame_if_pandas_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}]
    result = TrainResult({}, history, Path("runs/a"), Path("runs/a/model"), None, {})
    assert list(result.to_pandas()["reward/mean"]) == [0.5, 0.75]
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(
        UserError, match="pandas is not installed; add it with: uv pip install pandas"
    ):
        result.to_pandas()
