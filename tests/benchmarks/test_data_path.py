"""The data path at toy size: it runs, and a token costs no Python work."""

import pytest

from benchmarks.data_path import PROMPT_TOKENS, Shape, measure

SHAPE = Shape(prompts=4, samples=4, shortest=8_000, longest=8_000)


@pytest.mark.parametrize("way", ["arrays", "lists"])
async def test_every_token_arrives_in_the_batch(way):
    found = await measure(SHAPE, way)
    assert found.tokens == 16 * (8_000 + PROMPT_TOKENS)


async def test_a_token_costs_less_than_python_work_and_less_than_a_list_entry():
    found = await measure(SHAPE)
    assert found.us_per_token < 0.5, "a list's way takes this at its quickest"
    assert found.bytes_per_token < 100, "of 130,000 tokens; at millions it is 35"
