"""Rows to prompts: the meaning of columns, and errors."""

import logging

import pytest

from skyasync import load_config
from skyasync.data.datasets import load_eval_prompts, load_prompts, warn_of_overlap
from skyasync.errors import UserError
from tests.rollout.episodes import tokenizer

HERE = "tests.data.test_datasets"


def rows_of_a_function():
    return [
        {"prompt": "sort 3 1", "answer": "1 3"},
        {"prompt": [{"role": "user", "content": "x"}], "env_class": "own"},
    ]


def no_prompt():
    return [{"prompt": "fine"}, {"promt": "x", "answer": 1}]


def problems():
    return [
        {
            "problem": "2 + 2",
            "solution": {"final": "4", "steps": "none"},
            "subject": "sums",
            "prompt": "other",
        }
    ]


def no_conversation():
    return [{"prompt": ["not", "messages"]}]


def two_domains():
    return [{"prompt": f"q{i}", "domain": "even" if i % 2 == 0 else "odd"} for i in range(4)]


def all_name_an_environment():
    return [{"prompt": "q", "env_class": "gsm8k"}]


def fails():
    raise KeyError("inside the user's function")


def load(function, *settings, is_eval=False):
    cfg = load_config(["trainer.policy.model.path=a/b", *settings])
    return load_prompts([f"{HERE}:{function}"], cfg, tokenizer(), is_eval=is_eval)


GSM8K = "environment.env_class=gsm8k"
REWARD = "environment.reward_funcs=[exact_match]"


def test_a_functions_rows_become_prompts_with_an_identity_and_extras():
    first, second = load("rows_of_a_function", GSM8K)
    assert first.messages == [{"role": "user", "content": "sort 3 1"}]
    assert (first.env_class, second.env_class) == ("gsm8k", "own")
    assert first.extras == {"answer": "1 3"}
    assert [p.id.row for p in (first, second)] == [0, 1]


def test_prompts_that_are_too_long_are_left_out_and_counted(caplog):
    with caplog.at_level(logging.WARNING):
        kept = load("rows_of_a_function", GSM8K, "trainer.max_prompt_length=12")
    assert [p.id.row for p in kept] == [1]
    assert "1 of 2 prompts have more than trainer.max_prompt_length=12 tokens" in caplog.text


def test_if_none_is_short_enough_that_is_an_error():
    with pytest.raises(UserError, match=r"trainer\.max_prompt_length=2"):
        load("rows_of_a_function", GSM8K, "trainer.max_prompt_length=2")


def test_columns_of_other_names():
    (found,) = load("problems", REWARD, "data.prompt_key=problem", "data.label_key=solution.final",
                    "data.domain_key=subject")  # fmt: skip
    assert found.messages == [{"role": "user", "content": "2 + 2"}]
    assert (found.extras["label"], found.extras["domain"]) == ("4", "sums")
    assert found.extras["prompt"] == "other"  # the row's own columns stay


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "data.prompt_key=problm",
            r"'problm' \(data.prompt_key\); it has: .*; did you mean 'problem'\?",
        ),
        (
            "data.label_key=solution.fnal",
            r"'solution.fnal' \(data.label_key\); .* did you mean 'solution.final'\?",
        ),
        (
            "data.domain_key=subjects",
            r"'subjects' \(data.domain_key\); .* did you mean 'subject'\?",
        ),
    ],
)
def test_a_wrong_column_name_is_answered_with_the_nearest(setting, message):
    with pytest.raises(UserError, match=f"data row 0 has no column {message}"):
        load("problems", REWARD, setting)


def test_a_row_without_a_prompt_is_named():
    with pytest.raises(
        UserError, match=r"data row 1 has no column 'prompt' .*; it has: promt, answer; .* 'promt'"
    ):
        load("no_prompt", GSM8K)


def test_a_prompt_that_is_no_conversation_is_refused():
    with pytest.raises(
        UserError, match="data row 0: 'prompt' must be a string, or a list of messages"
    ):
        load("no_conversation", GSM8K)


def test_reward_functions_are_the_environment_of_rows_that_name_none():
    assert [p.env_class for p in load("rows_of_a_function", REWARD)] == ["reward", "own"]


def test_a_domains_reward_functions_are_the_environment_too():
    rows = load(
        "two_domains",
        *(f"environment.domains.{name}.reward_funcs=gsm8k" for name in ("even", "odd")),
    )
    assert {p.env_class for p in rows} == {"reward"}


def test_reward_functions_that_would_judge_no_row_are_refused():
    with pytest.raises(
        UserError, match=r"exact_match would judge no row.*\(gsm8k\).*env_class_from_rows=false"
    ):
        load("all_name_an_environment", REWARD)
    (found,) = load("all_name_an_environment", REWARD, "environment.env_class_from_rows=false")
    assert found.env_class == "reward"


def test_a_row_without_an_environment_needs_a_default():
    with pytest.raises(
        UserError, match=r"data row 0 names no env_class and environment\.env_class is empty"
    ):
        load("rows_of_a_function")


def test_a_system_prompt_stands_in_front_where_there_is_none():
    found = load("rows_of_a_function", GSM8K, "data.system_prompt=Be brief.")
    assert [[m["role"] for m in p.messages] for p in found] == [["system", "user"]] * 2


def test_raw_text_takes_no_conversation():
    assert load("two_domains", GSM8K, "data.apply_chat_template=false")
    with pytest.raises(
        UserError, match=r"data row 1 holds a conversation, and data\.apply_chat_template=false"
    ):
        load("rows_of_a_function", GSM8K, "data.apply_chat_template=false")


def test_a_domain_with_settings_must_be_some_rows_domain():
    settings = [GSM8K, "environment.domains.evn.scale=2"]
    with pytest.raises(
        UserError,
        match=r"environment.domains.evn: no training row has this domain.*did you mean 'even'",
    ):
        load("two_domains", *settings)
    assert load("two_domains", *settings, is_eval=True)  # a held-out set may lack some of them


def test_held_out_prompts_that_are_trained_on_are_counted(caplog):
    train, other = load("two_domains", GSM8K), load("rows_of_a_function", GSM8K)
    with caplog.at_level(logging.WARNING):
        assert warn_of_overlap(train, [*train[:2], *other]) == 2
    assert "2 of 4 held-out prompts are also training prompts" in caplog.text
    assert warn_of_overlap(train, other) == 0


def test_an_error_in_the_users_function_is_raised_as_it_is():
    with pytest.raises(KeyError, match="inside the user's function"):
        load("fails", GSM8K)


JUDGE = ["environment.judges.j.engine=policy", "environment.judges.j.prompt='{rubric} {response}'"]


@pytest.mark.parametrize(
    ("row", "more", "line"),
    [
        (
            {"rubrik": "x"},
            JUDGE,
            r"data row 1: the prompt of judge j shows {rubric}, .* did you mean {rubrik}\?",
        ),
        (
            {"rubric": "x", "reward_funcs": ["judge:k"]},
            JUDGE,
            "data row 1: unknown judge 'k': allowed: j",
        ),
        (
            {"reward_funcs": "instruction_following"},
            [],
            "data row 1: reward function instruction_following needs the ro",
        ),
    ],
)
def test_a_row_that_nothing_could_judge_is_told_before_the_run(row, more, line):
    funcs = "judge:j" if more else "exact_match"
    cfg = load_config(
        ["trainer.policy.model.path=a/b", f"environment.reward_funcs=[{funcs}]", *more]
    )
    rows = [
        {"prompt": "a", "label": "b", "rubric": "be kind"},
        {"prompt": "c", "label": "d", **row},
    ]
    for is_eval in (False, True):
        with pytest.raises(UserError, match=line):
            load_prompts(["mine"], cfg, tokenizer(), is_eval=is_eval, loaded_rows={"mine": rows})


@pytest.mark.parametrize(
    "metric, row, known",
    [("exact_match", {}, True), ("exact_match/spread", {}, True), ("mine/exact_match", {"domain": "mine"}, True),
     ("exact_mach", {}, False), ("multiple_choice", {"reward_funcs": ["multiple_choice"]}, True),
     ("exact_match", {"reward_funcs": ["multiple_choice"]}, False)],
)  # fmt: skip
def test_a_metric_that_no_reward_function_reports_is_told_before_the_run(metric, row, known):
    cfg = load_config(["trainer.policy.model.path=a/b", REWARD, f"trainer.algorithm.dynamic_sampling.metric={metric}",
                       "trainer.algorithm.dynamic_sampling.type=variance"])  # fmt: skip
    rows = {"mine": [{"prompt": "a", "label": "b", **row}]}
    assert load_prompts(["mine"], cfg, tokenizer(), is_eval=True, loaded_rows=rows)
    if known:
        assert load_prompts(["mine"], cfg, tokenizer(), loaded_rows=rows)
    else:
        with pytest.raises(
            UserError, match=f"data row 0: unknown metric in .*dynamic_sampling.metric '{metric}': "
        ):
            load_prompts(["mine"], cfg, tokenizer(), loaded_rows=rows)


def test_held_out_sets_are_numbered_through_and_bear_their_names():
    cfg = load_config(["trainer.policy.model.path=a/b", "environment.env_class=gsm8k", "data.val_data=mine",
                       "data.val_sets={aime: [mine, more]}"])  # fmt: skip
    known = {"mine": [{"prompt": "a"}, {"prompt": "b"}], "more": [{"prompt": "c"}]}
    found = load_eval_prompts(cfg, tokenizer(), loaded_rows=known)
    assert [(p.id.row, p.eval_set) for p in found] == [
        (0, ""),
        (1, ""),
        (2, "aime"),
        (3, "aime"),
        (4, "aime"),
    ]
