"""Experts that vLLM packs for its CPU kernels are computed with as they were sent, update after update."""

import pytest

from benchmarks.sync_gaps import Shape, measure

pytestmark = [pytest.mark.vllm, pytest.mark.recipe, pytest.mark.timeout(600)]


async def test_updates_leave_the_gap_where_rounding_puts_it():
    rows = measure(Shape("moe", "untied", "float32"), ["full", "delta"], ["recompute"], "vllm", updates=2, looks=2)
    async for _, _, row in rows:
        assert max(row["probe"], row["sampled"], row["in flight"]) <= row["limit"]
