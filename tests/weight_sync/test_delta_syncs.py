"""Delta syncs into real engines: bitwise the same weights as by syncs of all weights."""

import os

import pytest
import torch

from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import EngineConfig
from skyasync.models.fsdp import checkpoint
from skyasync.trainer import RayPPOTrainer
from skyasync.weight_sync import delta
from skyasync.weight_sync.tensors import digests_of
from skyasync.weight_sync.transfers.file import PREFIX, directories
from skyasync.weight_sync.update import WeightSyncError
from skyasync.workers.dispatch import memory_transfer
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, config, without_times
from tests.weight_sync.policy_and_engine import running

pytestmark = pytest.mark.slow

PROBE = [[*range(1, 60)], [7, 200, 31, 5] * 10]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


def weights_of(engine):
    return digests_of(engine._model.tensors())


def sent(policy):
    return digests_of(
        checkpoint.full_weights(policy.backend.sharded_weights(), policy.backend.dtype)
    )


def files():
    return {path for folder in directories() for path in folder.glob(f"{PREFIX}{os.getpid()}-*")}


async def trained(model, mode, dtype):
    """A run of a few steps in bfloat16: its metrics, and the engine's final weights."""
    cfg = config(model, steps=2)
    cfg.trainer.policy.model.dtype, cfg.generator.weight_sync_mode = "bfloat16", mode
    cfg.trainer.policy.optimizer_config.lr = 1e-4
    engine = TransformersEngine(
        EngineConfig(model, dtype=dtype, threads=1, max_model_len=64, kv_cache_gb=0.1)
    )
    await engine.start()
    try:
        run = LocalRun(RayPPOTrainer, cfg, engine=engine)
        run.trainer.weight_sync.tolerance = 0.5
        await run.train()
        return (
            without_times(run.tracker.rows),
            weights_of(engine),
            sent(run.dispatch.worker("policy")),
        )
    finally:
        await engine.shutdown()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_a_run_is_the_same_and_the_engine_holds_the_same(model, dtype):
    rows, weights, published = await trained(model, "delta", dtype)
    expected, by_whole_files, _ = await trained(model, "full", dtype)
    assert weights == by_whole_files
    if dtype == "bfloat16":
        assert published.items() <= weights.items()
    changed = [rows[step].pop("sync/share_changed") for step in sorted(rows)]
    count = [rows[step].pop("sync/bytes") for step in sorted(rows)]
    assert sum(rows[step].pop("sync/fallbacks") for step in rows) == 0
    assert rows == expected
    assert all(0.001 < share < 0.4 for share in changed), changed
    assert all(
        0 < size < 2 * 2 * 30_000 * share + 3_000
        for size, share in zip(count, changed, strict=True)
    )


@pytest.fixture
async def pair(model):
    async with running("transformers", model, "bfloat16", PROBE) as pair:
        pair.dispatch._cfg.generator.weight_sync_mode = "delta"
        pair.dispatch.transfer = memory_transfer(pair.dispatch._cfg, pair.dispatch._groups)
        pair.sync.expects_late_engines = True
        yield pair


async def hand_over(pair):
    pair.step(1e-4)
    await pair.hand_over()
    metrics = await pair.verify()
    assert sent(pair.dispatch._policy).items() <= weights_of(pair.engine).items()
    return metrics


async def test_an_engine_that_holds_something_else_is_sent_all_and_so_is_one_that_comes_late(pair):
    first, second = await hand_over(pair), await hand_over(pair)
    assert second["sync/bytes"] < first["sync/bytes"] / 2
    pair.engine._content.content = "other"
    third = await hand_over(pair)
    assert (third["sync/fallbacks"], third["sync/bytes"]) == (1, first["sync/bytes"])
    assert (await hand_over(pair))["sync/bytes"] < first["sync/bytes"] / 2
    late = TransformersEngine(pair.engine.config)
    await late.start()
    async with pair.sync.between_syncs() as update:
        await late.update_weights(update)
    await pair.client.join(late)
    assert (await hand_over(pair))["sync/fallbacks"] == 1
    assert weights_of(late) == weights_of(pair.engine)
    await late.shutdown()


async def test_new_trainer_processes_send_all(pair):
    await hand_over(pair)
    pair.dispatch._policy.weight_sender.file._delta = (
        delta.DeltaEncoder()
    )  # as when the engine's update begins
    assert (await hand_over(pair))["sync/share_changed"] == 1
    assert (await hand_over(pair))["sync/share_changed"] < 0.4


async def test_a_step_that_changes_most_weights_is_sent_whole(pair):
    await hand_over(pair)
    pair.step(1.0)
    await pair.hand_over()
    found = await pair.sync.verify(pair.version)
    assert found["sync/fallbacks"] == 1 and found["sync/share_changed"] > 0.9
    assert (await hand_over(pair))["sync/fallbacks"] == 1


async def test_a_fault_in_what_the_engine_holds_is_found_in_the_very_sync(pair, monkeypatch):
    await hand_over(pair)
    put = delta.put

    def loses_a_bit(tensor, changes):
        put(tensor, changes)
        tensor.view(-1).view(torch.int16)[0] ^= 1

    with (
        monkeypatch.context() as faulty,
        pytest.raises(WeightSyncError, match="engine holds other weights"),
    ):
        faulty.setattr(delta, "put", loses_a_bit)
        await hand_over(pair)
    assert (await hand_over(pair))["sync/fallbacks"] == 1, (
        "its weights are unknown, so it is sent all"
    )
    name, tensor = next(iter(pair.engine._model.tensors().items()))
    tensor.view(-1).view(torch.int16)[0] ^= 1
    with pytest.raises(WeightSyncError, match=name):
        await pair.hand_over()  # of a sync without any change


async def test_no_file_is_left(pair):
    before = files()
    for _ in range(3):
        await hand_over(pair)
    await pair.sync.release_retained()
    assert files() == before
