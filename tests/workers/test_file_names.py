"""Weights for engines that load files: under the names that the model's own files have."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyasync.config.schema import Config
from skyasync.weight_sync.shared_memory import read_digests, read_weights, remove_weights
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
    for file in (worker.publish(), worker.publish_changes().path):
        weights = {name: tensor.clone() for name, tensor in read_weights(file).items()}
        assert read_digests(file).keys() == weights.keys()
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
