"""Engines that load files get weights under the names of the model's own files."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from skyasync.config.schema import Config
from skyasync.models.fsdp import checkpoint
from skyasync.weight_sync.full_tensors import FileLayout, FullTensors, specs_in
from skyasync.weight_sync.tensors import from_message
from skyasync.weight_sync.transfers.file import read_metadata, read_weights, remove_weights
from skyasync.workers.policy import PolicyWorker
from tests.planning.models import configuration


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose experts transformers fuses when it loads them."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configuration("qwen3_moe")).save_pretrained(folder)
    return folder


def published(path, backend, rank=0):
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.backend, cfg.trainer.policy.lora.rank = (
        str(path),
        backend,
        rank,
    )
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    for encoding in ("full", "delta"):
        file, *_ = worker.transfer_weights("file", "write", encoding)
        weights = {name: tensor.clone() for name, tensor in read_weights(file).items()}
        assert read_metadata(file)[0].keys() == weights.keys()
        remove_weights(file)
        yield weights


@pytest.mark.parametrize("rank", [0, 2])
def test_experts_are_sent_one_by_one_to_an_engine_that_loads_files(model, rank):
    files = load_file(model / "model.safetensors")
    for found in published(model, "vllm", rank):
        assert found.keys() == files.keys()
        assert all(torch.equal(found[name], files[name]) for name in files)


def test_an_engine_that_has_the_trainers_model_gets_them_as_they_are_there(model):
    for found in published(model, "transformers"):
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in found)


def test_float32_shards_travel_in_the_dtype_of_the_engines(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    drawn = {"a": torch.randn(6, 5), "b": torch.arange(4)}
    shards = {
        name: distribute_tensor(each, init_device_mesh("cpu", (1,)), [Shard(0)])
        for name, each in drawn.items()
    }
    travelled, gather = [], DTensor.full_tensor
    monkeypatch.setattr(
        DTensor, "full_tensor", lambda self: travelled.append(self.dtype) or gather(self)
    )
    full = dict(FullTensors(shards, torch.bfloat16))
    assert travelled == [torch.bfloat16, torch.int64]
    assert torch.equal(full["a"], drawn["a"].bfloat16()) and torch.equal(full["b"], drawn["b"])
    FullTensors({"a": shards["a"]}, torch.float64).only_gather()
    assert travelled[2:] == [torch.float32], "never in more bytes"


MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4, "head_dim": 16},
    "granitemoe": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "head_dim": 16},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_a_broadcast_has_the_names_and_shapes_of_the_files_of_every_moe_family(tmp_path, family):
    """vLLM's loaders know no other names for most families; NCCL's ``specs`` are these."""
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SMALL, **MIXTURES[family])
    ).save_pretrained(tmp_path)
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.backend = str(tmp_path), "vllm"
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    sent = worker.transfer_weights("broadcast", "specs")
    files = {
        name: list(tensor.shape)
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert {name: list(shape) for name, (_, shape) in from_message(sent).items()} == files


def test_tensors_that_can_only_be_split_together_are(monkeypatch):
    """A model whose files have one tensor for two parameters."""

    def undo(_, weights):
        both = {"a", "b"} <= weights.keys()
        return {"ab": torch.cat([weights["a"], weights["b"]])} if both else weights

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", undo)
    weights = {"a": torch.ones(2), "b": torch.zeros(3)}
    tensors = FullTensors(
        weights, torch.bfloat16, FileLayout(None, specs_in(weights, torch.bfloat16))
    )
    assert (
        tensors.specs
        == {"ab": (torch.bfloat16, (5,))}
        == {n: (t.dtype, tuple(t.shape)) for n, t in tensors}
    )


def test_an_export_in_several_files_has_an_index_of_them(model, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "EXPORTED_FILE", "20KB")
    cfg = Config()
    cfg.trainer.policy.model.path = str(model)
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    worker.export(str(tmp_path))
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(files) > 1 and set(index.values()) == files
    expected = load_file(model / "model.safetensors")
    assert index.keys() == expected.keys()
    assert all(
        torch.equal(load_file(tmp_path / index[name])[name], expected[name]) for name in expected
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (
        loaded.state_dict().keys()
        == AutoModelForCausalLM.from_pretrained(model).state_dict().keys()
    )
