import pytest

from skyasync.envs.reward import GSM8kEnv
from skyasync.errors import UserError
from skyasync.rewards.answer_match import final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("so 3 + 4 = 7\n####7", "7"),
        ("#### 1 then #### 2", "2"),
        ("#### 1,234,567", "1234567"),
        ("#### -5", "-5"),
        ("#### 0.5", "0.5"),
        ("#### .5", ".5"),
        ("the answer is 72", None),
        ("####", None),
        ("", None),
    ],
)
def test_the_final_number_is_the_last_one_after_the_delimiter(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("extras", "action", "reward"),
    [
        ({"reward_spec": {"ground_truth": "72"}}, "#### 72", 1.0),
        ({"reward_spec": {"ground_truth": "1,000"}}, "#### 1000", 1.0),
        ({"reward_spec": {"ground_truth": "72"}}, "72", 0.0),
        ({"answer": 5}, "#### 5", 1.0),
        ({"answer": "5"}, "#### 50", 0.0),
        ({"reward_spec": None, "answer": "5"}, "#### 5", 1.0),
        ({"answer": "5"}, "no number", 0.0),
    ],
)
def test_one_turn_is_right_or_wrong(extras, action, reward):
    step = GSM8kEnv({}, extras).step(action)
    assert (step["reward"], step["done"]) == (reward, True)


def test_a_row_without_the_right_answer_is_refused_with_what_it_has():
    with pytest.raises(
        UserError, match=r"reward_spec.ground_truth or answer; the row has: question"
    ):
        GSM8kEnv({}, {"question": "x"}).step("#### 1")
