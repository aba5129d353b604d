"""What the plan says is saved for the backward pass, against what autograd saves."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedConfig

from skyasync.config.schema import LoraConfig
from skyasync.models.lora import Adapters
from skyasync.planning.memory import Pass, layer_bytes
from skyasync.planning.shape import FAMILIES, between_halves, shape_of
from tests.planning.models import as_json, layer_counts

ROWS, WIDTH = 2, 96


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "shared prompts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_saves_what_autograd_saves(name: str, dtype: torch.dtype, masked: bool) -> None:
    two, four = layer_counts(name)
    saved = (_saved(four, dtype, masked) - _saved(two, dtype, masked)) / 2
    work = Pass(ROWS * WIDTH, WIDTH, loss_tokens=0, masked=masked)
    assert layer_bytes(shape_of(as_json(two), name), work, dtype.itemsize) == pytest.approx(saved, rel=0.01)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_frozen_layer_with_adapters_saves_what_autograd_saves(name: str) -> None:
    two, four = layer_counts(name)
    lora = LoraConfig(rank=8)
    saved = (_saved(four, torch.bfloat16, False, lora) - _saved(two, torch.bfloat16, False, lora)) / 2
    shape, work = shape_of(as_json(two), name), Pass(ROWS * WIDTH, WIDTH, loss_tokens=0)
    planned = layer_bytes(shape, work, 2, frozen=True) + work.tokens * between_halves(shape, lora) * 2
    assert planned == pytest.approx(saved, rel=0.02)


def _saved(config: PreTrainedConfig, dtype: torch.dtype, masked: bool, lora: LoraConfig | None = None) -> int:
    """Bytes of different storages, parameters aside."""
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * len(config.layer_types)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    if lora:
        Adapters(model, lora, "").begin(0, torch.device("cpu"))
        model.to(dtype)  # as FSDP2 computes
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that its address is not given out again
        return tensor

    mask = torch.ones(ROWS, 1, WIDTH, WIDTH, dtype=torch.bool).tril() if masked else None
    positions = torch.arange(WIDTH).expand(ROWS, WIDTH) if masked else None
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(
            input_ids=torch.randint(0, 512, (ROWS, WIDTH)), attention_mask=mask, position_ids=positions, use_cache=False
        )
    return sum(storage.nbytes() for storage in storages.values())
