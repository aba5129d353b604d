"""Reward functions, weights and domains: every error is reported before a process starts."""

import pytest

from skyasync.config.load import ConfigError, load_config
from skyasync.config.schema.environment import Domain, check_domains, domains_of, proportions_of
from skyasync.config.schema.judges import judges_of


def load(*overrides):
    return load_config(
        ["trainer.policy.model.path=a/b", *(f"environment.{o}" for o in overrides)]
    ).environment


def test_domains_are_read_from_a_free_mapping():
    environment = load(
        "domains.sums.reward_funcs=math_verify", "domains.sums.scale=2", "domains.sums.proportion=0.25",
        "domains.text={reward_funcs: [exact_match, 'my.module:f'], reward_weights: [1, 0.5]}",
    )  # fmt: skip
    assert domains_of(environment.domains) == {
        "sums": Domain(("math_verify",), (), 2, 0.25),
        "text": Domain(("exact_match", "my.module:f"), (1, 0.5)),
    }
    assert proportions_of(environment.domains) == {"sums": 0.25}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward_funcs=[exact_mach]"], "'exact_mach': did you mean 'exact_match'"),
        (
            ["reward_funcs=[gsm8k]", "reward_weights=[1,2]"],
            "reward_weights has 2 entries for 1 of environment.reward_f",
        ),
        (["reward_weights=[1]"], "reward_weights has 1 entries for 0"),
        (["reward_funcs=[gsm8k,gsm8k]"], "environment.reward_funcs names gsm8k twice"),
        (
            ["reward_funcs=[gsm8k]", "env_class=gsm8k"],
            "reward_funcs are called by environment.env_class=reward, not",
        ),
        (
            ["domains.a=3"],
            "environment.domains.a must be a mapping with some of reward_funcs, .*, found 3",
        ),
        (
            ["domains.a.reward_func=[gsm8k]"],
            "domains.a.reward_func: unknown entry .*: did you mean 'reward_funcs'",
        ),
        (
            ["domains.a.reward_funcs=[gsm8]"],
            "domains.a.reward_funcs: unknown reward function 'gsm8': .* 'gsm8k'",
        ),
        (["domains.a.reward_funcs=3"], "domains.a.reward_funcs: expected a list of names, found 3"),
        (
            ["domains.a={reward_funcs: [gsm8k], reward_weights: [1, 2]}"],
            "domains.a.reward_weights has 2 entries for 1",
        ),
        (
            ["domains.a.reward_weights=1"],
            "domains.a.reward_weights: expected a list of numbers, found 1",
        ),
        (["domains.a.scale=much"], "domains.a.scale: expected a number, found 'much'"),
        (["domains.a.scale=true"], "domains.a.scale: expected a number, found True"),
        (
            ["domains.a.proportion=0"],
            "domains.a.proportion: must be greater than 0 and at most 1, found 0",
        ),
        (
            ["domains.a.proportion=0.7", "domains.b.proportion=0.4"],
            "environment.domains add up to 1.1",
        ),
    ],
)
def test_what_is_wrong_is_one_line_with_the_way_out(overrides, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load(*overrides)
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "chain_sm.size=3",
            r"data.reasoning_gym.chain_sm is for no task in data.train_data: .* 'chain_sum'",
        ),
        ("chain_sum=3", r"data.reasoning_gym.chain_sum must be a mapping of options, found 3"),
    ],
)
def test_options_are_for_tasks_that_are_asked_for(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(["trainer.policy.model.path=a/b", "data.train_data=reasoning_gym:chain_sum",
                     f"data.reasoning_gym.{override}"])  # fmt: skip


def test_several_problems_are_told_at_once():
    assert len(list(check_domains({"a": {"scale": "x", "weight": 1}, "b": None}))) == 3


SERVER = ["judges.a.base_url=http://h:1/v1", "judges.a.model=m"]


@pytest.mark.parametrize(
    "overrides",
    [
        [*SERVER, "reward_funcs=[judge:a]"],
        ["judges.a.engine=policy", "domains.x.reward_funcs=[judge:a, gsm8k]"],
        [*SERVER, "judges.a.clip=[0,1]", "judges.a.timeout_s=5", r"judges.a.parser='Score: (\d+)'"],
        [
            *SERVER,
            "judges.a.prompt='Good? {response}'",
            "judges.a.extra_body={reasoning_effort: low}",
        ],
    ],
)
def test_judges_are_read_from_a_free_mapping(overrides):
    assert "a" in judges_of(load(*overrides).judges)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reward_funcs=[judge:a]"],
            r"there is no judge 'a': judge:a needs environment.judges.a.base_url",
        ),
        (
            [*SERVER, "reward_funcs=[judge:b]"],
            "unknown judge 'b': allowed: a: judge:b needs environment.judges.b",
        ),
        ([*SERVER, "domains.x.reward_funcs=[judge:b]"], "unknown judge 'b'"),
        (
            ["judges.a=3"],
            "environment.judges.a must be a mapping with base_url and model, or engine, found 3",
        ),
        (
            ["judges.a.base_ulr=x"],
            "judges.a.base_ulr: unknown entry 'base_ulr': did you mean 'base_url'",
        ),
        (
            ["judges.a.model=m"],
            "judges.a needs base_url .* for a server in OpenAI's form, or engine=policy",
        ),
        (["judges.a.base_url=http://h/v1"], "judges.a.model is empty"),
        (
            ["judges.a.base_url=h:8000/v1", "judges.a.model=m"],
            "judges.a.base_url=h:8000/v1: expected http://HOST",
        ),
        (
            [*SERVER[1:], "judges.a.base_url=http://h/v1/chat/completions"],
            "leave out /chat/completions",
        ),
        ([*SERVER, "judges.a.engine=policy"], "judges.a has both base_url and engine"),
        (
            ["judges.a.engine=polcy"],
            "judges.a.engine=polcy: unknown engine 'polcy': did you mean 'policy'",
        ),
        (
            ["judges.a.engine=policy", "judges.a.model=m"],
            "judges.a.model=m has no effect with engine=policy",
        ),
        (
            [*SERVER, "judges.a.parser=yesno"],
            "judges.a.parser: unknown parser 'yesno': did you mean 'yes_no'",
        ),
        ([*SERVER, "judges.a.parser='(x'"], r"judges.a.parser=\(x is not a regular expression"),
        ([*SERVER, "judges.a.parser='(x)(y)'"], "has 2 groups: one, around the result"),
        (
            [*SERVER, "judges.a.prompt='Is it good? {prompt}'"],
            "judges.a.prompt does not show the judge the response",
        ),
        ([*SERVER, "judges.a.timeout_s=0"], "judges.a.timeout_s=0: must be greater than 0"),
        ([*SERVER, "judges.a.retries=1.5"], "judges.a.retries: expected int, found 1.5"),
        ([*SERVER, "judges.a.cache=maybe"], "judges.a.cache: expected bool .*, found 'maybe'"),
        (
            [*SERVER, "judges.a.clip=[1,0]"],
            r"judges.a.clip: expected \[low, high\], two numbers, found \[1, 0\]",
        ),
        ([*SERVER, "judges.a.clip=1"], r"judges.a.clip: expected \[low, high\]"),
        ([*SERVER, "judges.a.scale=0"], "judges.a.scale=0 makes every result the same"),
        ([*SERVER, "judges.'a b'.engine=policy"], "judges"),
    ],
)
def test_a_wrong_judge_is_one_line_with_the_way_out(overrides, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load(*overrides)
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    "override", ["api_key=sk-secret", "api_key_env=sk-secret", "base_url=http://me:sk-secret@h/v1",
                 "base_url=https://h/v1?key=sk-secret"]
)  # fmt: skip
def test_a_key_in_the_configuration_is_refused_and_not_repeated(override):
    with pytest.raises(ConfigError) as raised:
        load("judges.a.model=m", f"judges.a.{override}")
    assert "secret" not in str(raised.value) and "api_key_env" in str(raised.value)


def test_wrong_domains_of_streamed_data_are_told_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(
            [
                "data.streaming=true",
                "trainer.max_training_steps=1",
                "environment.domains.a.scale=much",
            ]
        )
    assert len(refused.value.problems) == 1 and "expected a number" in refused.value.problems[0]
