"""Faults of a weight sync into the embedded engine: each is found at once, even if a step changes very little."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch

from skyasync.errors import UserError
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.weight_sync import tensors
from skyasync.weight_sync.transfers import shared_memory
from skyasync.weight_sync.transfers.file import remove_weights, write_weights
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate
from skyasync.weight_sync.verify.log_probabilities import gap
from skyasync.workers.dispatch import memory_transfer
from tests.inference.tiny_llama import save_tiny_llama
from tests.weight_sync.policy_and_engine import (
    LAYER,
    SWAPPED,
    arriving,
    flipped_bit,
    losing_a_bit,
    moved_by_writing_over,
    never_fails,
    running,
    stale_layer,
    swapped_pair,
)

pytestmark = pytest.mark.slow

PROBE = [[*range(1, 60)], [7, 200, 31, 5] * 10]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(params=["float32", "bfloat16"])
async def pair(request, model):
    async with running("transformers", model, request.param, PROBE) as pair:
        yield pair


async def test_fifty_syncs_never_fail(pair):
    assert max(await never_fails(pair, 50)) < 0.75


@pytest.mark.parametrize(
    ("fault", "named"),
    [(stale_layer, LAYER), (swapped_pair, SWAPPED[0]), (flipped_bit, SWAPPED[0])],
)
async def test_a_fault_is_found_in_the_very_sync(pair, fault, named):
    pair.step()
    await pair.hand_over()
    pair.step()
    with (
        arriving(pair.engine._model, fault),
        pytest.raises(WeightSyncError, match=f"engine holds.*{named}"),
    ):
        await pair.hand_over()
    await pair.hand_over()
    await pair.verify()


async def test_a_head_that_has_come_loose_from_its_embedding_is_refused(pair):
    model = pair.engine._model._model
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    pair.step()
    with pytest.raises(UserError, match=r"missing \['lm_head.weight'\]"):
        await pair.hand_over()


async def test_what_the_trainer_sends_but_does_not_compute_with_is_found_by_the_probe(pair):
    """The digests are right: they are those of the tensors that were sent."""
    sent = {
        name: p.clone()
        for name, p in pair.engine._model._model.state_dict().items()
        if "lm_head" not in name
    }
    path = write_weights(swapped_pair(sent, {}))
    await pair.client.update_weights(WeightUpdate(1, "shared_memory", {"path": path}))
    remove_weights(path)
    with pytest.raises(
        WeightSyncError, match=r"engine 0 and the trainer differ by .*at start-up they differed by"
    ):
        await pair.verify()


@pytest.mark.parametrize("kept", [True, False])
async def test_weights_alternate_between_two_buffers_if_the_engine_computes_on_them(pair, kept):
    pair.sync.expects_late_engines = kept
    head, buffers = pair.engine._model._model.get_output_embeddings(), []
    for _ in range(5):
        pair.step()
        await pair.hand_over()
        await pair.verify()
        buffers.append(head.weight.data_ptr())
        assert head.weight is pair.engine._model._model.get_input_embeddings().weight
    assert len(set(buffers)) == 2 and buffers[:3] == buffers[2:]


async def test_what_an_engine_computes_on_is_proven_before_it_is_paused(pair, monkeypatch):
    order, prove = [], shared_memory.BufferWriter.prove
    monkeypatch.setattr(
        shared_memory.BufferWriter, "prove", lambda writer: (order.append("proven"), prove(writer))
    )

    @asynccontextmanager
    async def paused():
        order.append("paused")
        yield

    pair.step()
    await pair.sync.sync(1, paused)
    assert order == ["proven", "paused"]
    pair.step()
    with losing_a_bit(), pytest.raises(WeightSyncError, match="shared memory holds other weights"):
        await pair.sync.sync(2, paused)
    assert order == ["proven", "paused", "proven"], "the engine was not touched"
    await pair.hand_over()
    await pair.verify()


async def gap_of_tokens(pair, name):
    """The mean over 256 sampled tokens, as a run compares its own."""
    sampling = SamplingParams(max_tokens=64, ignore_eos=True, temperature=1.0)
    asked = [GenerationRequest(f"{name}-{i}", [7, i + 1, 3], sampling) for i in range(4)]
    answers = await asyncio.gather(*(pair.client.generate(request) for request in asked))
    whole = [
        [*r.prompt_token_ids, *a.token_ids.tolist()] for r, a in zip(asked, answers, strict=True)
    ]
    scores = await pair.dispatch.score(whole)
    return gap([row[2:] for row in scores], [answer.logprobs.tolist() for answer in answers]).mean


async def test_a_layer_that_the_trainer_forgot_to_send_is_found_by_the_tokens_that_are_sampled_next(
    pair, monkeypatch
):
    """The digests are right, and no verification prompts are due."""
    pair.sync.interval = 100
    for name in ("first", "second", "third"):
        pair.step(1e-3)
        await pair.hand_over()
        await pair.verify()
        pair.sync.sampled(pair.version, await gap_of_tokens(pair, name))
    sent, write = pair.dispatch._policy.backend.sharded_weights(), shared_memory.BufferWriter.write
    old = {
        n: getattr(w, "_local_tensor", w).detach().clone() for n, w in sent.items() if LAYER in n
    }

    def stale(writer, kinds, weights):
        return write(writer, kinds, ((name, old.get(name, tensor)) for name, tensor in weights))

    monkeypatch.setattr(shared_memory.BufferWriter, "write", stale)
    pair.step(5e-2)
    await pair.hand_over()
    assert not await pair.verify()
    with pytest.raises(
        WeightSyncError, match=r"sampled by version 4 and the trainer differ by .*allowed is"
    ):
        pair.sync.sampled(pair.version, await gap_of_tokens(pair, "fourth"))


async def test_an_engine_that_computes_on_shared_memory_takes_a_file_as_well(pair):
    for _ in range(2):
        pair.step()
        await pair.hand_over()
    policy = pair.dispatch._policy
    mapped = policy.weight_sender.shared_memory.writer._front.tensors
    written = [tensor.clone() for tensor in mapped.values()]
    pair.step(1e-2)
    path, *_ = await asyncio.to_thread(policy.transfer_weights, "file", "write")
    await pair.client.update_weights(WeightUpdate(7, "shared_memory", {"path": path}))
    remove_weights(path)
    await pair.verify()
    assert all(map(torch.equal, written, mapped.values())), (
        "other engines may compute on the weights"
    )
    await pair.hand_over()
    await pair.verify()


async def test_an_engine_that_comes_late_computes_on_what_was_written_last(pair):
    pair.sync.expects_late_engines = True
    for _ in range(3):
        pair.step()
        await pair.hand_over()
    late = TransformersEngine(pair.engine.config)
    await late.start()
    try:
        async with pair.sync.between_syncs() as update:
            await late.update_weights(update)
        pair.step(1e-2)
        await pair.dispatch.transfer.publish(0)  # the next weights are being written
        assert await late.score(PROBE) == await pair.engine.score(PROBE)
        ours, theirs = late._model.tensors(), pair.engine._model.tensors()
        assert update.version == 3 and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    finally:
        await late.shutdown()


async def test_mapped_weights_are_looked_through_once_for_all_engines_and_by_one_that_comes_late(
    pair, monkeypatch
):
    """So a sync takes the same time for four engines as for one."""
    pair.sync.expects_late_engines, digest, looked = True, tensors.digest, []
    monkeypatch.setattr(tensors, "digest", lambda tensor: looked.append(tensor) or digest(tensor))
    pair.step()
    await pair.hand_over()
    assert not looked, "the engine has read the bytes that the trainer verifies"
    async with pair.sync.between_syncs() as update:
        await pair.engine.update_weights(update)
    assert len(looked) == len(update.info["specs"])


async def test_writing_the_next_weights_changes_nothing_before_the_engine_is_told(pair):
    untold, told = await moved_by_writing_over(pair)
    assert untold < 1e-4 < 1e-2 < told


async def test_what_is_kept_in_a_folder_of_several_machines_is_gone_with_the_run(pair, tmp_path):
    cfg = pair.dispatch._policy.cfg
    cfg.generator.weight_sync_dir = str(tmp_path)
    pair.dispatch.transfer = memory_transfer(cfg, pair.dispatch._groups)
    pair.sync.expects_late_engines = True
    for _ in range(2):
        pair.step()
        await pair.hand_over()
        await pair.verify()
        assert [str(path) for path in tmp_path.iterdir()] == [
            pair.dispatch.transfer._retained_update.info["path"]
        ]
    await pair.sync.release_retained()
    assert not list(tmp_path.iterdir())
