"""The data path at toy size, both ways in one run: a busy machine slows both."""

from benchmarks.data_path import PROMPT_TOKENS, Shape, measure

SHAPE = Shape(prompts=4, samples=4, shortest=8_000, longest=8_000)


async def test_every_token_arrives_in_the_batch_and_arrays_cost_less_than_lists():
    arrays, lists = await measure(SHAPE), await measure(SHAPE, "lists")
    assert arrays.tokens == lists.tokens == 16 * (8_000 + PROMPT_TOKENS)
    assert arrays.us_per_token < lists.us_per_token
    assert arrays.bytes_per_token < lists.bytes_per_token
    assert arrays.longest_turn_s < lists.longest_turn_s
