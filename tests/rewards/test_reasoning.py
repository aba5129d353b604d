"""The scorers of reasoning-gym's tasks."""

import pytest

from skyasync.rewards import REWARDS
from skyasync.rewards.reasoning import rows
from skyasync.rewards.reward_functions import portable
from skyasync.utils.subprocess_worker import NoAnswerError, SubprocessPool

pytestmark = pytest.mark.slow

score = REWARDS["reasoning_gym"]


@pytest.mark.parametrize(
    "task", ["chain_sum", "number_sorting", "countdown", "prime_factorization", "knights_knaves"]
)
def test_the_tasks_own_answer_is_right_bare_and_in_an_answer_element(task):
    for row in rows(task, {"size": 3}, 1, evaluation=False):
        answer = row["label"]
        for response in (answer, f" {answer}\n", f"I think 0. <answer>{answer}</answer> Sure."):
            assert score(response=response, reasoning_gym=row["reasoning_gym"]) == 1.0


def test_a_scorer_that_fails_on_an_answer_gives_nothing():
    (row,) = rows("prime_factorization", {"size": 1}, 1, evaluation=False)
    assert score(response="not even a number", reasoning_gym=row["reasoning_gym"]) == 0.0


@pytest.mark.matrix
def test_a_scorer_that_runs_the_answer_loses_no_more_than_the_judges_process():
    (row,) = rows("spiral_matrix", {"size": 1}, 1, evaluation=False)
    judge, function = SubprocessPool(8), portable(score, "reasoning_gym")

    def call(response):
        return judge.call(
            "reasoning_gym",
            function,
            {"response": response, "reasoning_gym": row["reasoning_gym"]},
            5.0,
        )

    with pytest.raises(NoAnswerError, match="ended its process"):
        call("__import__('os')._exit(0)")
    assert call(row["label"]).reward == 1.0
    judge.close()
