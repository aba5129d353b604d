"""Adapters that are sent alone: engines compute with the same weights as after a merged sync."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.inference.backends.vllm.setup import lora_arguments
from skyasync.models.fsdp import checkpoint
from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
from skyasync.weight_sync.adapters import read_adapter, with_added
from skyasync.weight_sync.tensors import digests_of
from skyasync.weight_sync.transfers.file import remove_weights
from skyasync.weight_sync.update import WeightSyncError
from tests.inference.tiny_llama import save_tiny_llama
from tests.planning.models import configuration
from tests.trainer.plans.local_run import LocalRun, config, without_times
from tests.weight_sync.policy_and_engine import running

PROBE = [[*range(1, 60)], [7, 200, 31, 5] * 10]
LORA = {"rank": 4, "alpha": 8.0, "sync": "adapter"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
async def pair(model, request):
    async with running(
        "transformers", model, getattr(request, "param", "bfloat16"), PROBE, lora=LORA
    ) as pair:
        yield pair


def merged(policy):
    return digests_of(
        checkpoint.full_weights(policy.backend.sharded_weights(), policy.backend.dtype)
    )


def adapters_of(pair):
    return digests_of(pair.engine._model.tensors())


@pytest.mark.parametrize("pair", ["float32", "bfloat16"], indirect=True)
async def test_the_engine_holds_bit_for_bit_what_a_merged_sync_sends(pair):
    pair.sync.expects_late_engines = True
    before = adapters_of(pair)
    for _ in range(3):
        pair.step(1e-2)
        await pair.hand_over()
        metrics = await pair.verify()
        assert merged(pair.dispatch._policy).items() <= adapters_of(pair).items()
        adapters = [
            p for n, p in pair.dispatch._policy.backend.model.named_parameters() if ".lora_" in n
        ]
        assert metrics["sync/bytes"] == sum(p.numel() * 4 for p in adapters)
        assert metrics["sync/logprob_gap_mean"] <= metrics["sync/logprob_gap_limit"]
    assert adapters_of(pair) != before
    async with pair.sync.between_syncs() as update:
        assert update.info["path"].startswith("/proc/"), "kept for a late-joining engine"
        await pair.client.update_weights(update)


async def test_a_fault_in_either_copy_and_other_frozen_weights_are_found(pair, tmp_path_factory):
    pair.step(1e-2)
    await pair.hand_over()
    adapted = pair.engine._updater.adapters
    name, frozen = next(iter(adapted._frozen.items()))
    frozen.view(-1).view(torch.int16)[0] ^= 1
    with pytest.raises(WeightSyncError, match=f"keeps other weights.*{name}"):
        await pair.hand_over()
    frozen.view(-1).view(torch.int16)[0] ^= 1
    norm = pair.engine._model.tensors()["model.norm.weight"]
    norm.view(torch.int16)[0] ^= 1
    with pytest.raises(WeightSyncError, match=r"holds other weights.*model\.norm"):
        await pair.hand_over()
    adapted._digests = {}  # an engine that has just started with another model's files
    with pytest.raises(
        WeightSyncError, match="frozen weights of the transformers engine are not those"
    ):
        await pair.hand_over()


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
async def test_other_families_too(family, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configuration(family)).save_pretrained(tmp_path)
    async with running(
        "transformers", str(tmp_path), "float32", [[*range(1, 30)]], lora=LORA
    ) as pair:
        pair.step(1e-2)
        await pair.hand_over()
        await pair.verify()
        assert merged(pair.dispatch._policy).items() <= adapters_of(pair).items()


async def test_a_run_is_the_same_as_with_merged_syncs(model):
    rows = []
    for sync in ("adapter", "merged"):
        cfg = config(model, steps=2)
        vars(cfg.trainer.policy.lora).update(LORA | {"sync": sync})
        run = await LocalRun(AsyncRayPPOTrainer, cfg).train()
        rows.append(without_times(run.tracker.rows))
    assert all(row.pop("sync/bytes") > 0 for row in rows[0].values())
    assert rows[0] == rows[1]


def test_a_file_of_adapters_is_what_was_written_or_refused(model):
    cfg = Config()
    cfg.trainer.policy.model.path = model
    vars(cfg.trainer.policy.lora).update(LORA)
    from skyasync.workers.policy import PolicyWorker

    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    path, *_ = worker.transfer_weights("file", "write", "adapter")
    adapter = read_adapter(path)
    remove_weights(path)
    assert len(adapter.layers()) == 14 and adapter.scale == 2.0 and adapter.config["r"] == 4
    weight = torch.randn(6, 5)
    halves = (torch.randn(2, 5), torch.randn(6, 2))
    expected = weight + 2.0 * halves[1] @ halves[0]
    torch.testing.assert_close(with_added(weight, halves, 2.0, transposed=False), expected)
    torch.testing.assert_close(with_added(weight.T, halves, 2.0, transposed=True), expected.T)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("weight_sync_backend", "nccl", "goes by a file"),
        ("weight_sync_mode", "delta", "both send less than all weights"),
        (
            "engines",
            ["http://127.0.0.1:8000"],
            "needs generator.backend=transformers (supported backends: transformers, vllm); found vllm_server",
        ),
    ],
)
def test_what_cannot_take_adapters_is_refused_by_the_key(key, value, line):
    cfg = Config()
    vars(cfg.trainer.policy.lora).update(LORA)
    cfg.generator.backend = "auto" if key == "engines" else "vllm"
    setattr(cfg.generator, key, value)
    assert any(
        line in problem and "trainer.policy.lora.sync=adapter" in problem
        for problem in check_config(cfg)
    )


def test_an_adapter_of_the_head_is_refused_where_the_engine_has_no_place_for_it():
    cfg = Config()
    vars(cfg.trainer.policy.lora).update(LORA | {"target_modules": ["q_proj", "lm_head"]})
    cfg.generator.backend = "vllm"
    assert any("adapter of lm_head" in problem for problem in check_config(cfg))
    cfg.generator.backend = "transformers"
    assert not any("lm_head" in problem for problem in check_config(cfg))


def test_vllm_allocates_the_next_supported_rank(model):
    assert [lora_arguments(rank, model)["max_lora_rank"] for rank in (1, 4, 8, 9, 500)] == [
        1,
        8,
        8,
        16,
        512,
    ]
    with pytest.raises(UserError, match=r"trainer.policy.lora.rank=600.*sync=merged"):
        lora_arguments(600, model)
    named = lora_arguments(4, model)["lora_target_modules"]
    assert named == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
