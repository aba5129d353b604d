"""Sharded models are loaded bitwise as ``from_pretrained`` loads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    HrmTextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from skyasync.models.fsdp import loading
from skyasync.models.fsdp.sharding import shard_placement
from skyasync.models.heads import load_causal_lm
from skyasync.workers.frozen import ReferenceWorker
from skyasync.workers.model_worker import ModelWorker
from skyasync.workers.policy import PolicyWorker
from tests.workers.conftest import config_for
from tests.workers.processes import Rank, Ranks

RANKS = 4
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 50, **LAYERS}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 10, "head_dim": 8}


def under_the_heads_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without_the_head(folder: Path) -> None:
    """As official GPT-2 is stored: the base model's names."""
    AutoModel.from_pretrained(folder).save_pretrained(folder)


#: Name of a model: its configuration, and what is done to its folder.
MODELS: dict[str, tuple[PreTrainedConfig, Callable[[Path], None] | None]] = {
    "llama": (LlamaConfig(**SMALL, tie_word_embeddings=False), None),
    "llama_tied": (LlamaConfig(**SMALL, tie_word_embeddings=True), None),
    "llama_tied_by_the_head": (LlamaConfig(**SMALL, tie_word_embeddings=True), under_the_heads_name),
    "qwen2": (Qwen2Config(**SMALL), None),
    "qwen3_tied": (Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True), None),
    "gpt2": (GPT2Config(vocab_size=97, n_embd=40, n_layer=2, n_head=4, n_positions=64), None),
    "gpt2_base": (GPT2Config(vocab_size=97, n_embd=40, n_layer=2, n_head=4, n_positions=64), without_the_head),
    "qwen2_moe": (
        Qwen2MoeConfig(**SMALL, num_experts=7, moe_intermediate_size=10, shared_expert_intermediate_size=10), None
    ),
    "qwen3_moe_with_fewer_experts_than_ranks": (Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=2), None),
    "qwen3_moe_with_a_rank_without_experts": (Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=5), None),
    "hrm_text_by_rank_zero": (HrmTextConfig(**SMALL), None),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, fork_socket: Path) -> Iterator[dict[str, Any]]:
    """Results of four processes by name: on 4 ranks, then on 2 of them, then on 1."""
    folder = tmp_path_factory.mktemp("models")
    for name, (config, change) in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        if change is not None:
            change(folder / name)
    ranks = Ranks(RANKS, fork_socket)
    ranks.call(examine, folder)
    ranks.close()
    results: dict[str, Any] = {}
    for part in sorted(folder.glob("*.json")):
        for name, value in json.loads(part.read_text()).items():
            results[name] = results.get(name, type(value)()) + value
    yield results


def examine(process: Rank, folder: Path) -> None:
    """Runs on each rank; writes its results next to the models."""
    rank, found = process.rank, dict[str, Any]()
    for world in (RANKS, 2, 1):
        if rank >= world:
            break
        store = dist.FileStore(str(folder / f"store{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        for name in MODELS:
            for role in (PolicyWorker, ReferenceWorker):
                with pytest.MonkeyPatch.context() as patch:
                    if "rank_zero" not in name:
                        patch.setattr(loading, "_from_rank_zero", None)
                    found[f"{name} {world} {role.__name__}"] = differences(
                        load(role, folder / name, rank, world)
                    )
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found))


def load(role: type[ModelWorker], path: Path, rank: int, world: int) -> ModelWorker:
    """A policy with float32 master weights, or a bfloat16 reference."""
    cfg = config_for(str(path))
    cfg.trainer.policy.model.dtype = "bfloat16"
    worker = role(cfg, rank, world)
    worker.setup()
    return worker


def differences(worker: ModelWorker) -> list[str]:
    """Names of parameters and buffers that differ from ``from_pretrained``."""
    loaded, expected = (
        worker.backend.model.model,
        as_published(worker.backend.spec.path, worker.backend.master_dtype()),
    )
    wrong = []
    if type(loaded) is not type(expected) or loaded.config.to_dict() != expected.config.to_dict():
        wrong.append("class or configuration")
    for kind in ("named_parameters", "named_buffers"):
        there = {name: whole(tensor) for name, tensor in getattr(loaded, kind)()}
        wanted = {name: tensor.detach() for name, tensor in getattr(expected, kind)()}
        wrong += sorted(set(there) ^ set(wanted))
        wrong += [name for name in set(there) & set(wanted) if not same(there[name], wanted[name])]
    return wrong


@cache
def as_published(path: str, dtype: torch.dtype) -> PreTrainedModel:
    return load_causal_lm(path, dtype)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@pytest.mark.parametrize("ranks", [8, 24, 48, 64, 96, 128, 256, 512, 1024])
def test_a_moe_model_of_30b_is_read_in_slices_by_any_number_of_ranks(ranks: int) -> None:
    """Qwen3-30B-A3B: its routers have 128 rows, so that from 129 ranks on some have none of them."""
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
    config = Qwen3MoeConfig(
        **sizes,
        num_hidden_layers=2,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        head_dim=128,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    converters = [
        each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)
    ]
    assert converters
    assert loading.can_be_sliced(model, converters, shard_placement(ranks))
    assert not loading.can_be_sliced(model, converters, lambda parameter: Shard(1)), "fused halves"


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_sharded_weights_and_buffers_are_bit_for_bit_those_of_from_pretrained(
    found: dict[str, Any], name: str, ranks: int
) -> None:
    for role in ("PolicyWorker", "ReferenceWorker"):
        assert found[f"{name} {ranks} {role}"] == []
