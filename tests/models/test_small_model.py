"""Small models of the same family: every kind of layer stays, and the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from skyasync.errors import UserError
from skyasync.examples.tiny.model import build
from skyasync.models import VOCABULARY
from skyasync.models.small_model import HEAD_DIM, make_small_model, shrink

FAMILIES = (
    "Llama Mistral Qwen2 Qwen3 Qwen3Moe Qwen2Moe Mixtral Gemma2 Gemma3Text Phi3 DeepseekV3 Glm4 Glm4Moe GptOss Olmo2 "
    "Olmoe Qwen3Next GPT2 Granite Cohere2 SmolLM3 Llama4Text"
)
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [1.5] * 48,
    "rope_theta": 10000.0,
}
M_ROPE = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}


def small(family: str, tensor: int = 1, **settings: object) -> Any:
    config = getattr(transformers, f"{family}Config")(**settings)
    shrink(config, tensor)
    text = config.get_text_config()
    text.vocab_size = 200
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    return config


def logits(config: Any) -> torch.Tensor:
    auto: Any = (
        AutoModelForImageTextToText if "vision_config" in vars(config) else AutoModelForCausalLM
    )
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    assert sum(p.numel() for p in model.parameters()) < 1.5e6
    with torch.no_grad():
        computed: torch.Tensor = model(input_ids=torch.arange(2, 40)[None]).logits
    return computed


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.split())
def test_a_family_made_small_computes_and_has_all_kinds_of_layers(family: str) -> None:
    kinds = set(getattr(getattr(transformers, f"{family}Config")(), "layer_types", None) or ())
    config = small(family)
    assert set(getattr(config, "layer_types", None) or ()) == kinds
    assert logits(config).isfinite().all()


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_mixture_that_begins_with_dense_layers_keeps_experts(family: str) -> None:
    config: Any = AutoConfig.for_model(family)
    shrink(config)
    assert config.mlp_layer_types == ["dense"] * 3 + ["sparse"] and config.num_hidden_layers == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["Qwen2_5_VL", "Qwen3VL", "Idefics3", "SmolVLM", "Gemma3", "Llava"]
)
def test_so_does_a_family_that_reads_images(family: str) -> None:
    settings = {"text_config": {"rope_parameters": M_ROPE}} if family == "Qwen2_5_VL" else {}
    assert logits(small(family, **settings)).isfinite().all()


def test_factors_of_rotary_embeddings_fit_the_smaller_heads() -> None:
    config = small("Phi3", rope_parameters=LONG, original_max_position_embeddings=4096)
    assert [len(config.rope_parameters[name]) for name in ("short_factor", "long_factor")] == [
        16,
        16,
    ]
    assert logits(config).isfinite().all()


@pytest.mark.parametrize(
    "heads, kv_heads, expected", [(32, 32, (8, 8)), (32, 8, (8, 4)), (32, 1, (8, 1))]
)
def test_heads_stay_as_they_were_grouped_and_divide_over_the_tensor_axis(
    heads: int, kv_heads: int, expected: tuple[int, int]
) -> None:
    config = small("Llama", tensor=2, num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert (config.num_attention_heads, config.num_key_value_heads) == expected


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_computes_heads_of_this_size_on_cpus() -> None:
    """An engine of other sizes starts, and ends at the first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert HEAD_DIM in CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.slow
def test_a_folder_keeps_its_tokenizer_and_its_weights_are_not_read(tmp_path: Path) -> None:
    source, target = tmp_path / "large", tmp_path / "small"
    (Path(build(out=source, progress=False, steps=1)) / "model.safetensors").write_bytes(
        b"no weights"
    )
    count = make_small_model(source, target, VOCABULARY, {}, 1, seed=3)
    model, config = AutoModelForCausalLM.from_pretrained(target), AutoConfig.from_pretrained(source)
    assert sum(p.numel() for p in model.parameters()) == count
    assert (model.config.vocab_size, model.config.model_type) == (
        config.vocab_size,
        config.model_type,
    )
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(target)
    assert before.get_vocab() == after.get_vocab() and before.chat_template == after.chat_template
    make_small_model(source, tmp_path / "again", VOCABULARY, {}, 1, seed=3)
    assert (target / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()


def test_a_family_without_attention_heads_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "num_hidden_layers": 2}')
    with pytest.raises(UserError, match=r"no small model of type mamba can be made"):
        make_small_model(tmp_path, tmp_path / "small", VOCABULARY, {}, 1, seed=0)
