"""Which differences of log-probabilities count, and on which tokens they are measured."""

import math

import pytest

from skyasync.weight_sync.verify.log_probabilities import Gap, choose_probe, gap


def test_mean_and_largest_are_over_all_tokens_of_all_sequences():
    assert gap([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-3.25]]) == Gap(0.25, 0.5)
    assert gap([], []) == Gap(0.0, 0.0)


@pytest.mark.parametrize(
    "found", [[[math.nan]], [[-math.inf]], [[]], [], [[-1.0, -1.0]], [[-1.0], [-1.0]]]
)
def test_what_is_missing_or_no_number_is_an_infinite_gap(found):
    assert gap([[-1.0]], found) == Gap(math.inf, math.inf)


def test_verification_prompts_are_whole_prompts_as_many_as_fit():
    prompts = [[1] * 3, [2] * 4, [3] * 9, [4]]
    assert choose_probe(prompts, 8) == prompts[:2]
    assert choose_probe(prompts, 7) == prompts[:2]
    assert choose_probe(prompts, 100) == prompts


def test_a_first_prompt_that_is_too_long_is_cut():
    assert choose_probe([[1] * 9, [2]], 8) == [[1] * 8]
