"""Adapters in the memory plan: as many numbers as peft makes, and frozen weights without gradients or moments."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from skyasync.config.schema import Config
from skyasync.models.lora import Adapters
from skyasync.planning.plan import make_plan
from skyasync.planning.shape import FAMILIES, adapter_parameters, shape_of
from tests.planning.models import as_json, configuration
from tests.planning.test_plan import EIGHT, QWEN_7B, place, settings

SOME = ["q_proj", "self_attn.v_proj", "up_proj", "c_attn"]


@pytest.mark.parametrize("targets", [["all-linear"], SOME], ids=["all", "some"])
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_have_as_many_numbers_as_pefts(name: str, targets: list[str]) -> None:
    config = configuration(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    lora = Config().trainer.policy.lora
    lora.rank, lora.target_modules = 3, [t for t in targets if t == "all-linear" or t.rpartition(".")[2] in linear]
    Adapters(model, lora, "")
    counted = adapter_parameters(shape_of(as_json(config), name), lora)
    assert counted == sum(p.numel() for n, p in model.named_parameters() if ".lora_" in n)


def test_frozen_weights_have_neither_gradients_nor_moments_nor_masters() -> None:
    cfg = settings()
    cfg.trainer.ckpt_interval, cfg.trainer.algorithm.use_kl_loss = 1, True
    whole = make_plan(cfg, QWEN_7B, EIGHT)
    cfg.trainer.policy.lora.rank = 16
    adapters = make_plan(cfg, QWEN_7B, EIGHT)
    lines, trained = place(adapters, "policy").lines, adapters.rank.adapters
    assert trained == 40_370_176  # 16 * (in + out) of seven matrices in 28 layers
    assert lines["weights"] == QWEN_7B.parameters * 2 // 4
    assert lines["moments"] == 2 * lines["adapters"] == 2 * trained * 4 // 4
    assert lines.get("gradients", 0) <= 2 * lines["adapters"]
    assert place(adapters, "policy").total < place(whole, "policy").total - (20 << 30)
    assert "reference" in whole.processes and "reference" not in adapters.processes
    assert "reference: weights" not in lines
    cfg.trainer.policy.lora.base_dtype = "nf4"
    coded = place(make_plan(cfg, QWEN_7B, EIGHT), "policy").lines["weights"]
    matrices = QWEN_7B.layers * QWEN_7B.layer_matrices
    assert coded == pytest.approx((2 * (QWEN_7B.parameters - matrices) + 4.5 / 8 * matrices) / 4, rel=1e-6)
    saved = place(adapters, "host").lines.get("checkpoint", 0)
    assert saved <= 4 * 3 * trained * 4
