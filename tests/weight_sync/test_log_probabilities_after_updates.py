"""After random updates trainer and engine are as close as at the start: shapes, dtypes, transfers, KV policies.

A sample of the combinations; ``python -m benchmarks.sync_gaps`` measures all, with either engine.
"""

import pytest

from benchmarks.sync_gaps import Shape, measure

pytestmark = pytest.mark.slow

CHOSEN = [
    (Shape("llama", "tied", "bfloat16"), ["delta"], ["keep"]),
    (Shape("qwen2", "untied", "float32"), ["full", "delta"], ["recompute"]),
    (Shape("qwen3", "tied", "float32", rope=True), ["adapter"], ["keep"]),
    (Shape("gpt2", "untied", "bfloat16"), ["adapter"], ["recompute"]),
    (Shape("moe", "untied", "bfloat16"), ["full"], ["keep"]),
]


@pytest.mark.parametrize(("shape", "modes", "kvs"), CHOSEN, ids=str)
async def test_updates_leave_the_gap_where_rounding_puts_it(shape, modes, kvs):
    async for _, kv, row in measure(shape, modes, kvs, "transformers", updates=8, looks=2):
        assert row["probe"] <= row["limit"]
        assert row["sampled"] <= row["limit"]
        assert kv == "keep" or row["in flight"] <= row["limit"]
