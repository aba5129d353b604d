"""Tiny vision-language models with random weights that images really change, one with M-RoPE and one without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image as PIL
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedModel,
)

from skyasync.examples.vision.model import qwen3_vl, vision_tokenizer
from skyasync.models.images import Image, read_image

FAMILIES = ("qwen3_vl", "idefics3")
MARKS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tiny(family: str, folder: Path) -> str:
    model, processor = qwen3_vl() if family == "qwen3_vl" else idefics3()
    redraw(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def redraw(model: PreTrainedModel, seed: int = 0) -> None:
    """Scale 1 / sqrt(inputs): with the usual initial weights images have almost no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                std = 0.15 if "embed_tokens" in name else parameter[0].numel() ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def idefics3() -> tuple[Idefics3ForConditionalGeneration, Idefics3Processor]:
    tokenizer = vision_tokenizer(MARKS, TEMPLATE)
    edge = {"longest_edge": 56}
    images = Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 352,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 1024, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=image, scale_factor=2, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, processor


def noise(seed: int, width: int = 56, height: int = 56) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return read_image(PIL.fromarray(pixels))
