"""As ``test_log_probabilities_after_updates``, with vLLM: transposed layers, and biases."""

import pytest

from benchmarks.sync_gaps import Shape, measure

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.matrix
async def test_updates_leave_the_gap_where_rounding_puts_it(engines_session):
    rows = measure(
        Shape("gpt2", "untied", "bfloat16"),
        ["full", "delta"],
        ["recompute"],
        "vllm",
        updates=2,
        looks=1,
    )
    async for _, _, row in rows:
        assert max(row["probe"], row["sampled"], row["in flight"]) <= row["limit"]
