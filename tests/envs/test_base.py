"""Checks of an environment's output."""

import numpy as np
import pytest

from skyasync.envs.base import check_metrics, check_prompt, check_step

GOOD = {
    "observations": [{"role": "user", "content": "and?"}],
    "reward": 1,
    "done": np.bool_(False),
    "metadata": {},
}


def test_a_right_step_becomes_plain_values():
    step = check_step(GOOD, raw=False, most_chars=10)
    assert step == {
        "observations": GOOD["observations"],
        "reward": 1.0,
        "done": False,
        "sampling_params": {},
    }
    assert type(step["done"]) is bool
    assert type(step["reward"]) is float


def test_sampling_params_may_be_lists_as_json_has_them():
    said = {"stop": ["\n", "end"], "bad_words": "never", "logit_bias": {"3": 1}, "temperature": 0.5}
    found = check_step(GOOD | {"sampling_params": said}, raw=False, most_chars=10)[
        "sampling_params"
    ]
    assert found == {
        "stop": ("\n", "end"),
        "bad_words": ("never",),
        "logit_bias": {3: 1.0},
        "temperature": 0.5,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": float("nan")}, "the reward is nan; it must be a finite number"),
        ({"reward": "1"}, "the reward is '1'"),
        ({"reward": None}, "the reward is None"),
        ({"reward": np.ones(2)}, "the reward is array"),
        ({"done": "yes"}, "done is 'yes'; it must be true or false"),
        ({"done": np.ones(2)}, "done is array"),
        ({"done": None}, "done is None"),
        ({"observations": "text"}, "list of messages with a role and a content; found 'text'"),
        ({"observations": ["text"]}, "list of messages"),
        ({"observations": [{"role": "user", "content": None}]}, "list of messages"),
        ({"observations": [{"content": "x"}]}, "list of messages"),
        (
            {"observations": [{"role": "user", "content": "x" * 11}]},
            "11 characters; at most 10 are allowed",
        ),
        ({"sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
        (
            {"sampling_params": {"stop": [1]}},
            r"step's sampling_params: stop must be texts; found \[1\]",
        ),
        ({"sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids must be token ids"),
        ({"sampling_params": {"logit_bias": [1]}}, "step's sampling_params: "),
    ],
)
def test_a_wrong_step_is_refused_with_what_was_found(changed, message):
    with pytest.raises(ValueError, match=message):
        check_step(GOOD | changed, raw=False, most_chars=10)


def test_a_step_must_be_a_dictionary_with_its_parts():
    with pytest.raises(ValueError, match="must return a dictionary; it returned None"):
        check_step(None, raw=False, most_chars=10)
    with pytest.raises(ValueError, match="lacks observations, done; it has: reward"):
        check_step({"reward": 1}, raw=False, most_chars=10)


@pytest.mark.parametrize("raw", [True, False])
def test_half_a_surrogate_pair_which_no_tokenizer_takes_is_replaced(raw):
    found, shown = (
        "not found: \ud83d \N{GRINNING FACE}",
        "not found: \N{REPLACEMENT CHARACTER} \N{GRINNING FACE}",
    )
    if raw:
        assert (
            check_step(GOOD | {"observations": found}, raw=True, most_chars=99)["observations"]
            == shown
        )
        return
    parts = [
        {"role": "tool", "content": [{"type": "text", "text": found}]},
        {"role": "user", "content": found},
    ]
    text, plain = check_step(GOOD | {"observations": parts}, raw=False, most_chars=99)[
        "observations"
    ]
    assert (text["content"][0]["text"], plain["content"]) == (shown, shown)


def test_an_environment_of_plain_text_gives_text():
    assert (
        check_step(GOOD | {"observations": "text"}, raw=True, most_chars=10)["observations"]
        == "text"
    )
    with pytest.raises(ValueError, match="must be text, since the environment has raw_text"):
        check_step(GOOD, raw=True, most_chars=10)
    assert check_prompt(("begin", {}), raw=True) == "begin"


def test_a_prompt_comes_with_a_dictionary():
    with pytest.raises(ValueError, match=r"init must return \(conversation, info\)"):
        check_prompt([{"role": "user", "content": "x"}], raw=False)


def test_ten_megabytes_are_not_repeated_in_the_message():
    with pytest.raises(ValueError) as caught:
        check_step(GOOD | {"reward": "x" * 10_000_000}, raw=False, most_chars=10)
    assert len(str(caught.value)) < 200


def test_metrics_are_finite_numbers():
    assert check_metrics({"turns": np.float32(2)}) == {"turns": 2.0}
    with pytest.raises(ValueError, match="the metric turns is 'two'"):
        check_metrics({"turns": "two"})
