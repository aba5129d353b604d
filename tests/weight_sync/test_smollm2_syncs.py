"""A real model: syncs of small steps pass, in both engines and dtypes, and a missing layer is found.

``SYNCS=50 pytest -m recipe tests/weight_sync/test_smollm2_syncs.py``, with SmolLM2 in the cache
(examples/smollm2/model.py).
"""

import os

import pytest

from examples.smollm2.model import FOLDER
from examples.smollm2.tasks import train_prompts
from skyasync.examples.tiny_models import cache_folder
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.tokenizer import load_tokenizer
from skyasync.weight_sync.tensors import as_message
from skyasync.weight_sync.update import WeightSyncError
from skyasync.weight_sync.verify.log_probabilities import choose_probe
from tests.weight_sync.policy_and_engine import arriving, never_fails, running, stale_layer
from tests.weight_sync.worker_faults import update_with

MODEL = cache_folder() / FOLDER
SYNCS = int(os.environ.get("SYNCS", "0"))

pytestmark = [
    pytest.mark.recipe,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not SYNCS or not MODEL.is_dir(), reason="asked for by SYNCS=50, with SmolLM2 in the cache"
    ),
]


def probe():
    chat = ChatTokenizer(load_tokenizer(str(MODEL)), True)
    return choose_probe((chat.prompt(row["prompt"]) for row in train_prompts()), 256)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_syncs_into_the_embedded_engine_pass_and_a_stale_layer_does_not(dtype):
    async with running("transformers", str(MODEL), dtype, probe()) as pair:
        print(dtype, sorted(await never_fails(pair, SYNCS)))
        pair.step()
        with (
            arriving(pair.engine._model, stale_layer),
            pytest.raises(WeightSyncError, match=r"layers\.1\."),
        ):
            await pair.hand_over()


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_syncs_into_vllm_pass_and_no_fault_does(dtype, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    async with running("vllm", str(MODEL), dtype, probe()) as pair:
        print(dtype, sorted(await never_fails(pair, SYNCS)))
        for fault in ("stale layer", "swapped pair", "head left behind", "flipped bit", ""):
            pair.step()
            update = await pair.dispatch.transfer.publish(0)
            (message,) = await pair.engine.llm.collective_rpc(
                update_with, args=(fault, as_message(update.info))
            )
            print(dtype, fault, message)
            assert bool(message) == bool(fault)
            await pair.dispatch.transfer.release(update)
