"""A model's shape from config.json against transformers' own modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyasync.errors import UserError
from skyasync.models.heads import load_causal_lm
from skyasync.models.token_model import can_share_prefixes
from skyasync.planning.shape import FAMILIES, read_shape, shape_of
from tests.models.tiny_vision import FAMILIES as VISION_FAMILIES
from tests.models.tiny_vision import save_tiny
from tests.planning.models import MODELS, as_json, configuration


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers_modules(name: str) -> None:
    config = configuration(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(as_json(config), name)
    layer = next(m for m in model.modules() if type(m).__name__ in set(model._no_split_modules))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer == sum(p.numel() for p in layer.parameters())
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefixes_are_shared_where_the_workers_share_them(name: str) -> None:
    config = configuration(name)
    assert shape_of(as_json(config), name).shares_prefixes == can_share_prefixes(config)


def test_known_models_have_their_published_sizes() -> None:
    qwen = {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    }  # fmt: skip
    mixtral = {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    }  # fmt: skip
    assert shape_of(qwen, "Qwen2.5-7B").parameters == 7_615_616_512
    assert shape_of(mixtral, "Mixtral-8x7B").parameters == 46_702_792_704


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "its config.json cannot be read"),
        ("[]", "holds no settings"),
        ('{"model_type": "llama", "hidden_size": 8}', "num_attention_heads"),
        ('{"hidden_size": 8}', "names no model_type"),
        ('{"model_type": "no_such_model"}', "no_such_model"),
    ],
)
def test_a_config_that_says_too_little_is_one_line(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=named) as caught:
        read_shape(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"a folder that holds nothing but config\.json is enough") as caught:
        read_shape("nobody/no-such-model-at-all")
    assert "\n" not in str(caught.value)


def test_a_folder_with_nothing_but_the_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(as_json(configuration("llama"))))
    assert read_shape(str(tmp_path)).layers == 2


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_vision_language_model_is_counted_with_its_tower(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / family)
    model = load_causal_lm(folder, torch.float32)
    shape = read_shape(folder)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer == sum(p.numel() for p in model.get_decoder().layers[0].parameters())
    assert not shape.shares_prefixes
