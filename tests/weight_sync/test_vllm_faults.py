"""Faults of a weight sync into vLLM: each is found at once, even if a step changes very little."""

import re

import pytest
import pytest_asyncio

from skyasync.weight_sync.tensors import as_message
from skyasync.weight_sync.update import WeightSyncError
from skyasync.workers.dispatch import memory_transfer
from tests.inference.tiny_llama import save_tiny_llama
from tests.weight_sync.policy_and_engine import LAYER, SWAPPED, losing_a_bit, never_fails, running
from tests.weight_sync.worker_faults import load_without_comparison, looks, update_with

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROBE = [[*range(1, 60)], [7, 200, 31, 5] * 10]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["float32", pytest.param("bfloat16", marks=pytest.mark.matrix)],
)
async def pair(engines_session, request, tmp_path_factory):
    model = save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True, head_dim=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "VLLM_ALLOW_INSECURE_SERIALIZATION", "1"
        )  # functions of this file run in the worker
        async with running("vllm", model, request.param, PROBE) as pair:
            yield pair


async def refusal(pair, fault):
    update = await pair.dispatch.transfer.publish(0)
    (answer,) = await pair.engine.llm.collective_rpc(
        update_with, args=(fault, as_message(update.info))
    )
    await pair.dispatch.transfer.release(update)
    return answer


@pytest.mark.matrix
async def test_fifty_syncs_never_fail(pair):
    assert max(await never_fails(pair, 50)) < 0.75


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("stale layer", f"engine holds.*{LAYER}"),
        ("swapped pair", f"engine holds.*{SWAPPED[0]}"),
        (
            "head left behind",
            "engine holds.*the output layer tied to|did not load all weights of lm_head",
        ),
        ("flipped bit", f"engine received.*{SWAPPED[0]}"),
    ],
)
async def test_a_fault_is_found_in_the_very_sync(pair, fault, named):
    pair.step()
    await pair.hand_over()
    pair.step()
    message = await refusal(pair, fault)
    assert re.search(named, message), message
    assert not await refusal(pair, "")
    await pair.verify()


@pytest.mark.parametrize(
    ("skipped", "layer"),
    [
        ("layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"),
        ("layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj"),
        ("layers.1.input_layernorm", "model.layers.1.input_layernorm"),
        ("embed_tokens", "model.embed_tokens"),
    ],
)
async def test_without_comparing_tensors_a_weight_that_the_loader_skips_is_found(
    pair, skipped, layer
):
    """As broadcasts between GPUs and CUDA IPC load: what layers compute with is not compared there."""
    pair.step()
    update = await pair.dispatch.transfer.publish(0)
    arguments = (as_message(update.info), skipped)
    (message,) = await pair.engine.llm.collective_rpc(load_without_comparison, args=arguments)
    (nothing,) = await pair.engine.llm.collective_rpc(
        load_without_comparison, args=(as_message(update.info), "none")
    )
    await pair.dispatch.transfer.release(update)
    assert f"did not load all weights of {layer}: the loader of LlamaForCausalLM" in message, (
        message
    )
    assert not nothing
    await pair.hand_over()
    await pair.verify()


async def test_every_tensor_of_the_model_is_among_those_that_are_checked(pair):
    names = await pair.engine.llm.collective_rpc(checked)
    assert (
        len(names[0]) == len(list(pair.dispatch._policy.backend.model.model.named_parameters())) + 1
    )  # the head
    assert not pair.sync._unproven


async def test_a_bit_lost_where_the_weights_lie_is_found_by_the_trainer_for_all_engines(pair):
    pair.step()
    with losing_a_bit(), pytest.raises(WeightSyncError, match="shared memory holds other weights"):
        await pair.hand_over()
    await pair.hand_over()
    await pair.verify()


async def test_bytes_that_the_trainer_proves_are_not_digested_again_and_no_layer_is_asked_twice(
    pair,
):
    """A late-joining engine digests the bytes itself: no check runs while it reads."""
    engine = pair.engine.llm
    update = await pair.dispatch.transfer.publish(0)
    await pair.dispatch.transfer.release(update)
    late = await pair.dispatch.transfer.for_late_engine(0)
    found = [
        (await engine.collective_rpc(looks, args=(as_message(each.info),)))[0]
        for each in (update, late)
    ]
    layers, tensors = found[0][2], len(update.info["specs"])
    assert found == [[0, layers, layers], [tensors, layers, layers]]
    await pair.hand_over()
    await pair.verify()


def checked(worker):
    return sorted(worker.weight_transfer_engine.layer_check._checked_names)


async def test_changes_alone_leave_the_weights_that_a_whole_file_leaves(pair):
    """Bitwise equal log-probabilities; an engine with other weights is sent all of them and continues."""
    generator = pair.dispatch._cfg.generator
    generator.weight_sync_mode = "delta"
    pair.dispatch.transfer = memory_transfer(pair.dispatch._cfg, pair.dispatch._groups)
    fallbacks = []
    for wrong in (False, False, True, False):
        pair.step()
        if wrong:
            pair.engine._content.content = "other"
        await pair.hand_over()
        fallbacks.append((await pair.verify())["sync/fallbacks"])
    by_changes = await pair.client.score(PROBE)
    generator.weight_sync_mode = "full"
    pair.dispatch.transfer = memory_transfer(pair.dispatch._cfg, pair.dispatch._groups)
    await pair.hand_over()
    assert await pair.client.score(PROBE) == by_changes
    whole = (
        pair.dispatch._policy.backend.dtype.itemsize == 4
    )  # a step changes nearly all of float32
    assert fallbacks == ([0, 1, 2, 3] if whole else [0, 0, 1, 1])
