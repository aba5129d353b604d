"""A model's shape from its config.json, and the few layers that represent all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyasync.errors import UserError
from skyasync.models.config import with_layers
from skyasync.models.heads import load_causal_lm
from skyasync.planning.shape import _depths, read_shape
from tests.models.tiny_vision import FAMILIES as VISION_FAMILIES
from tests.models.tiny_vision import save_tiny
from tests.planning.models import COMMON, MODELS, configuration


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers_modules(name: str, tmp_path: Path) -> None:
    config = configuration(name)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(str(tmp_path))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.layers, shape.hidden, shape.heads, shape.vocabulary) == (2, 64, 4, 512)
    assert shape.experts_per_token == (2 if shape.experts else 0)


@pytest.mark.parametrize(
    ("family", "settings", "layers"),
    [
        ("mixtral", {}, 4),
        ("qwen3_moe", {"mlp_only_layers": [0]}, 3),
        ("qwen2_moe", {"decoder_sparse_step": 2}, 2),
        ("deepseek_v3", {"first_k_dense_replace": 3, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
                         "qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1}, 1),
    ],
)  # fmt: skip
def test_experts_are_counted_in_the_layers_that_have_some(
    family: str, settings: dict[str, Any], layers: int, tmp_path: Path
) -> None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    sizes = dict.fromkeys(names, 4) | {"num_experts_per_tok": 2, "moe_intermediate_size": 176}
    AutoConfig.for_model(
        family, **COMMON | sizes | settings | {"num_hidden_layers": 4}
    ).save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert (shape.experts, shape.experts_per_token) == (4, 2)
    assert shape.expert_parameters == layers * 4 * 3 * shape.hidden * shape.intermediate


@pytest.mark.parametrize(
    ("kinds", "depths"),
    [
        ("a" * 36, (2, 3)),
        ("a" * 3, (2, 3)),
        ("aa", (2,)),
        ("ab" * 20, (2, 4)),
        ("aaaaab" * 6, (6, 12)),
        ("c" + "a" * 40, (3, 4)),
        ("abcdefgh", (8,)),
    ],
)
def test_depths_differ_by_whole_periods_after_layers_that_occur_once(
    kinds: str, depths: tuple[int, ...]
) -> None:
    assert _depths(kinds) == depths


def test_a_model_of_fewer_layers_keeps_the_kinds_of_the_first() -> None:
    config = configuration("gemma3_text", num_hidden_layers=12)
    kinds = list(config.layer_types)
    fewer = with_layers(config, 7)
    assert fewer.num_hidden_layers == 7 and fewer.layer_types == kinds[:7]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "its config.json cannot be read"),
        ("[]", "has no settings"),
        ('{"hidden_size": 8}', "names no model_type"),
        ('{"model_type": "no_such_model"}', "no_such_model"),
    ],
)
def test_a_config_that_says_too_little_is_one_line(
    tmp_path: Path, content: str, named: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=named) as caught:
        read_shape(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"a folder that holds nothing but config\.json is enough"
    ) as caught:
        read_shape("nobody/no-such-model-at-all")
    assert "\n" not in str(caught.value)


def test_a_folder_with_nothing_but_the_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"] | {"model_type": "llama"}))
    assert read_shape(str(tmp_path)).layers == 2


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_vision_language_model_is_counted_with_its_tower(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / family)
    model = load_causal_lm(folder, torch.float32)
    shape = read_shape(folder)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layers == len(model.get_decoder().layers)
