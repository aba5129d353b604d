"""vLLM packs experts for its CPU kernels, and computes with the sent weights, update after update."""

import pytest

from benchmarks.sync_gaps import PROBE, Shape, measure, save
from skyasync.weight_sync.tensors import as_message
from skyasync.weight_sync.update import WeightSyncError
from tests.weight_sync.policy_and_engine import running
from tests.weight_sync.worker_faults import EXPERTS, update_with

pytestmark = [pytest.mark.vllm, pytest.mark.recipe, pytest.mark.timeout(600)]


async def test_updates_leave_the_gap_where_rounding_puts_it():
    rows = measure(
        Shape("moe", "untied", "float32"),
        ["full", "delta"],
        ["recompute"],
        "vllm",
        updates=2,
        looks=2,
    )
    async for _, _, row in rows:
        assert max(row["probe"], row["sampled"], row["in flight"]) <= row["limit"]


async def test_experts_which_no_layer_can_be_asked_for_are_looked_at_by_the_probe_after_every_sync(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(
        "VLLM_ALLOW_INSECURE_SERIALIZATION", "1"
    )  # functions of this file run in the worker
    path = save(Shape("moe", "untied", "float32"), str(tmp_path), 32)
    async with running("vllm", path, "float32", PROBE) as pair:
        pair.sync.interval = 100
        for _ in range(4):
            pair.step()
            await pair.hand_over()
            assert "sync/logprob_gap" in await pair.verify()
        assert pair.sync._unproven and all(".experts." in name for name in pair.sync._unproven)
        pair.step()
        update = await pair.dispatch.transfer.publish(0)
        llm = pair.engine.llm
        assert await llm.collective_rpc(
            update_with, args=("swapped experts", as_message(update.info))
        ) == [""]
        await pair.dispatch.transfer.release(update)
        assert EXPERTS[0] in pair.sync._unproven
        with pytest.raises(WeightSyncError, match="engine 0 and the trainer differ by"):
            await pair.verify()
