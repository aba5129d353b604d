"""Weights for engines that load files: under the names that the model's own files have."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyasync.config.schema import Config
from skyasync.models.fsdp import checkpoint
from skyasync.weight_sync import full_tensors as file_names
from skyasync.weight_sync.full_tensors import FileLayout, FullTensors, specs_in
from skyasync.weight_sync.transfers.file import read_metadata, read_weights, remove_weights
from skyasync.workers.policy import PolicyWorker
from tests.planning.models import configuration


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Whose experts transformers joins when it loads them."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configuration("qwen3_moe")).save_pretrained(folder)
    return folder


def published(path, backend, rank=0):
    cfg = Config()
    cfg.trainer.policy.model.path, cfg.generator.backend, cfg.trainer.policy.lora.rank = str(path), backend, rank
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


def test_what_can_only_be_taken_apart_at_once_is(monkeypatch):
    """A model whose files have one tensor for two parameters."""

    def undo(_, weights):
        both = {"a", "b"} <= weights.keys()
        return {"ab": torch.cat([weights["a"], weights["b"]])} if both else weights

    monkeypatch.setattr(file_names, "revert_weight_conversion", undo)
    weights = {"a": torch.ones(2), "b": torch.zeros(3)}
    tensors = FullTensors(weights, torch.bfloat16, FileLayout(None, specs_in(weights, torch.bfloat16)))
    assert tensors.specs == {"ab": (torch.bfloat16, (5,))} == {n: (t.dtype, tuple(t.shape)) for n, t in tensors}


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
    assert all(torch.equal(load_file(tmp_path / index[name])[name], expected[name]) for name in expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == AutoModelForCausalLM.from_pretrained(model).state_dict().keys()
