"""The built-in rewards that compare text, and mathematics."""

import threading

import pytest

from skyasync.errors import UserError
from skyasync.rewards import REWARDS
from skyasync.rewards import answer_match as text


@pytest.mark.parametrize(
    ("name", "response", "label", "reward"),
    [
        ("exact_match", " 12\n", 12, 1.0),
        ("exact_match", "12 ", "13", 0.0),
        ("gsm8k", "so #### 1,072", "1072", 1.0),
        ("gsm8k", "#### 72", "It is 8 * 9 = 72.\n#### 72", 1.0),
        ("gsm8k", "72", "72", 0.0),
        ("math_verify", r"so it is $\frac{1}{2}$", "0.5", 1.0),
        ("math_verify", "The answer is 1,000.", 1000, 1.0),
        ("math_verify", r"\boxed{x + 1}", "1 + x", 1.0),
        ("math_verify", r"\boxed{1}", "1 + x", 0.0),
        ("math_verify", "so #### 1072", "1,072", 1.0),
        ("math_verify", "It is 3/4", r"$\frac{3}{4}$", 1.0),
        ("math_verify", "The answer is 7", "8", 0.0),
        ("math_verify", "no idea", "8", 0.0),
    ],
)
def test_right_and_wrong_answers(name, response, label, reward):
    assert REWARDS[name](response=response, label=label) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("so\n#### 3", 1.0),
        ("#### 3 ", 1.0),
        ("#### 3 apples", 0.0),
        ("#### 3 #### 3", 0.0),
        ("3", 0.0),
        ("####", 0.0),
    ],
)
def test_gsm8k_format_is_one_number_at_the_end(response, reward):
    assert REWARDS["gsm8k_format"](response=response) == reward


@pytest.mark.parametrize("name", ["exact_match", "gsm8k", "math_verify"])
def test_a_row_without_the_right_answer_is_refused(name):
    with pytest.raises(UserError, match=f"reward function {name} .*(data.label_key|label None)"):
        REWARDS[name](response="1", label=None)


def test_mathematics_in_a_thread_of_its_own():
    found = []
    thread = threading.Thread(
        target=lambda: found.append(REWARDS["math_verify"](response="$2^3$", label="8"))
    )
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.parametrize(
    "response",
    [
        "It is \\boxed{B}",
        "\\boxed{(b)}",
        "A seems so, but the answer is B.",
        "Answer: **B**",
        "**Answer:** B",
        "**Answer**: B",
        "The answer is: B",
        "The answer is **(b)**.",
        "Final answer: $B$",
        "\\boxed{\\text{B}}",
        "\\boxed{\\mathrm{(B)}}",
        "Answer: B. Paris. The answer is a capital city.",
        "so\n\n(B)",
        "B",
        "B.",
    ],
)
def test_a_choice_is_the_letter_that_a_response_settles_on(response):
    assert text.multiple_choice(response, "B") == 1.0
    assert text.multiple_choice(response, "(b)") == 1.0
    assert text.multiple_choice(response, "A") == 0.0


@pytest.mark.parametrize(
    "response", ["a", "Answer: a", "The answer is a.", "answer is a) a city", "Answer: A city"]
)
def test_a_letter_a_is_a_choice_unless_it_is_an_article(response):
    assert text.multiple_choice(response, "A") == 1.0
    assert text.multiple_choice("The answer is a city", "A") == 0.0


@pytest.mark.parametrize("response", ["", "I do not know", "Bananas are the best", "Both"])
def test_without_a_letter_there_is_no_choice(response):
    assert text.multiple_choice(response, "B") == 0.0
