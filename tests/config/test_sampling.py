"""Which sampling settings cause a warning, and which engine a configuration selects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyasync.config import ConfigError, load_config
from skyasync.config.check import config_warnings
from skyasync.config.schema import SamplingConfig
from skyasync.config.schema.sampling import FILTERS, HISTORY, UNMIRRORED, backend, evaluation
from skyasync.inference.interface import ENGINES
from skyasync.rollout.generator_api import request_seed, sampling_params

SAMPLING = "generator.sampling_params"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([f"{SAMPLING}.top_p=0.9", "trainer.algorithm.filter_logprobs=false"],
         ["top_p=0.9", "ratio to the behaviour policy is biased", "trainer.algorithm.filter_logprobs=true"]),
        ([f"{SAMPLING}.min_tokens=4"], ["min_tokens=4", "in the engine's log-probabilities alone"]),
    ],
)  # fmt: skip
def test_what_biases_the_ratio_to_the_behaviour_policy_is_said(
    overrides: list[str], named: list[str]
) -> None:
    (warning,) = config_warnings(load_config(overrides))
    assert all(text in warning for text in named)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"{SAMPLING}.top_p=0.9", f"{SAMPLING}.top_k=0", f"{SAMPLING}.temperature=0.7"],
        [f"{SAMPLING}.top_p=0.9", "trainer.algorithm.filter_logprobs=false",
         "trainer.algorithm.off_policy_correction=none"],
        ["generator.eval_sampling_params.repetition_penalty=1.1"],
        [f"{SAMPLING}.repetition_penalty=1.1", f"{SAMPLING}.presence_penalty=1",
         "trainer.algorithm.off_policy_correction=none"],
        [f"{SAMPLING}.bad_words=[no]", f"{SAMPLING}.temperature=0",
         "trainer.algorithm.advantage_estimator=reinforce++"],
    ],
)  # fmt: skip
def test_no_warning_where_the_ratio_is_right_or_not_used(overrides: list[str]) -> None:
    assert config_warnings(load_config(overrides)) == []


def test_every_setting_arrives_at_the_engines() -> None:
    cfg = SamplingConfig(
        max_generate_length=9, logit_bias={"15": 2}, seed=3, allowed_token_ids=[1, 15]
    )
    found = sampling_params(cfg)
    assert (found.max_tokens, found.logit_bias, found.seed, found.allowed_token_ids) == (
        9,
        {15: 2.0},
        3,
        (1, 15),
    )
    assert sampling_params(SamplingConfig()).seed is None
    ours = set(vars(cfg)) - {"max_generate_length"}
    assert ours == set(vars(found)) - {"max_tokens"}
    assert {n for about in ENGINES.builtins().values() for n in about.can["sampling"]} | set(
        FILTERS
    ) | set((*HISTORY, *UNMIRRORED)) <= ours


def test_samples_of_a_seed_differ_and_are_the_same_in_every_run() -> None:
    seeds = [
        request_seed(7, "e0-i0-r0-t0"),
        request_seed(7, "e0-i0-r1-t0"),
        request_seed(8, "e0-i0-r0-t0"),
    ]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**56 for seed in seeds if seed is not None)
    assert request_seed(7, "e0-i0-r0-t0") == seeds[0] and request_seed(None, "e0-i0-r0-t0") is None


def test_auto_means_the_engine_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyasync.config.schema.sampling.find_spec", lambda name: None)
    assert backend(load_config([])) == "transformers"
    monkeypatch.setattr("skyasync.config.schema.sampling.find_spec", lambda name: name)
    assert backend(load_config([])) == "vllm"


def test_what_evaluation_leaves_open_is_as_in_training_but_for_the_temperature() -> None:
    cfg = load_config(
        [
            f"{SAMPLING}.max_generate_length=1024",
            f"{SAMPLING}.temperature=0.7",
            f"{SAMPLING}.stop=[x]",
        ]
    )
    assert evaluation(cfg.generator) == replace(cfg.generator.sampling_params, temperature=0.0)
    evaluating = "generator.eval_sampling_params"
    cfg = load_config(
        [
            f"{evaluating}.temperature=null",
            f"{evaluating}.logit_bias.15=-2",
            f"{SAMPLING}.top_p=0.9",
        ]
    )
    assert evaluation(cfg.generator) == replace(
        cfg.generator.sampling_params, logit_bias={"15": -2}
    )
    with pytest.raises(
        ConfigError, match=r"eval_sampling_params\.top_p=2.*must be greater than 0 and at most 1"
    ):
        load_config([f"{evaluating}.top_p=2"])


def test_a_wrong_value_of_training_is_told_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([f"{SAMPLING}.logit_bias={{x: 1}}"])
    assert len(refused.value.problems) == 1
