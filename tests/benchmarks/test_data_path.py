"""The benchmark of the data path runs at toy size, both ways; its figures are not tested."""

from benchmarks.data_path import PROMPT_TOKENS, Shape, measure

SHAPE = Shape(prompts=4, samples=4, shortest=8_000, longest=8_000)


async def test_every_token_arrives_in_the_batch_and_arrays_hold_less_than_lists():
    arrays, lists = await measure(SHAPE), await measure(SHAPE, "lists")
    assert arrays.tokens == lists.tokens == 16 * (8_000 + PROMPT_TOKENS)
    assert arrays.bytes_per_token < lists.bytes_per_token
