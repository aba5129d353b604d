"""Tiny vision-language models of each supported type, with random weights for which images matter."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PIL
from torch import Tensor
from transformers import (
    CLIPImageProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

from skyasync.examples.vision.model import qwen3_vl, vision_tokenizer
from skyasync.inference.interface import GenerationOutput, GenerationRequest, InferenceEngine
from skyasync.models.backend import OutputRequest
from skyasync.models.batch import TokenBatch
from skyasync.models.images import Image, Images, read_image
from skyasync.models.packing import MicroBatches
from skyasync.models.token_model import TokenModel, can_share_prefixes
from skyasync.models.vision import processor_of

FAMILIES = ("qwen3_vl", "idefics3")  # one with M-RoPE and one without
UNUSED = ("vision_tower.encoder.layers.1.", "vision_tower.post_layernorm.")
"""LLaVA takes the states before its tower's last layer."""
OTHERS = ("qwen2_5_vl", "smolvlm", "llava")
DELIMITERS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tiny(family: str, folder: Path) -> str:
    model, processor = {
        "qwen3_vl": qwen3_vl, "qwen2_5_vl": qwen2_5_vl, "idefics3": idefics3, "smolvlm": smolvlm, "llava": llava
    }[family]()  # fmt: skip
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


def qwen2_5_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    like, processor = qwen3_vl()
    text = like.config.text_config.to_dict() | {"model_type": "qwen2_5_vl_text"}
    text["rope_parameters"].pop("mrope_interleaved")
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 14, "window_size": 112,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128, "fullatt_block_indexes": [1],
    }  # fmt: skip
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: vars(like.config)[name] for name in names}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
    )
    parts = (processor.image_processor, processor.tokenizer, processor.video_processor)
    return ended(Qwen2_5_VLForConditionalGeneration(config)), Qwen2_5_VLProcessor(
        *parts, chat_template=processor.chat_template
    )


def llama(tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    return {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 352,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 1024, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": True,  # vLLM reads it here
    }  # fmt: skip


TOWER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
EDGE = {"longest_edge": 56}


def ended(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id
    return model


def idefics3() -> tuple[PreTrainedModel, ProcessorMixin]:
    tokenizer = vision_tokenizer(DELIMITERS, TEMPLATE)
    images = Idefics3ImageProcessor(size=EDGE, max_image_size=EDGE, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    config = Idefics3Config(
        text_config=llama(tokenizer), vision_config=TOWER, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return ended(Idefics3ForConditionalGeneration(config)), processor


def smolvlm() -> tuple[PreTrainedModel, ProcessorMixin]:
    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # frames of videos in words
    tokenizer = vision_tokenizer(DELIMITERS, TEMPLATE)
    options = {"size": EDGE, "max_image_size": EDGE, "do_image_splitting": False}
    processor = processing_smolvlm.SmolVLMProcessor(
        SmolVLMImageProcessor(**options), tokenizer, SmolVLMVideoProcessor(**options), image_seq_len=4,
        chat_template=TEMPLATE,
    )  # fmt: skip
    config = SmolVLMConfig(
        text_config=llama(tokenizer), vision_config=TOWER, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return ended(SmolVLMForConditionalGeneration(config)), processor


def stand_in_for_num2words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and those that it starts. SmolVLM's processor needs the package for videos alone."""
    folder.mkdir()
    (folder / "num2words.py").write_text("num2words = str\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def llava() -> tuple[PreTrainedModel, ProcessorMixin]:
    """No delimiters around its images."""
    tokenizer = vision_tokenizer(("<image>",), TEMPLATE)
    images = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip
    config = LlavaConfig(
        text_config=llama(tokenizer), vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 64},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), image_seq_length=16, tie_word_embeddings=True,
    )  # fmt: skip
    return ended(LlavaForConditionalGeneration(config)), processor


def noise(seed: int, width: int = 56, height: int = 56) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return read_image(PIL.fromarray(pixels))


def conversation(images: int) -> list[dict[str, object]]:
    return [
        {
            "role": "user",
            "content": [*[{"type": "image"}] * images, {"type": "text", "text": "How many discs?"}],
        }
    ]


def prompt(folder: str, images: Images) -> list[int]:
    processor = processor_of(folder)
    tokenizer = processor._processor.tokenizer
    plain = tokenizer.apply_chat_template(
        conversation(len(images)), tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return processor.expand(plain, images).tolist()


def as_batch(
    prompts: list[list[int]], answers: list[list[int]], images: list[Images]
) -> TokenBatch:
    rows = [p + a for p, a in zip(prompts, answers, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    index = torch.arange(int(lengths.max()))
    tokens = torch.tensor([row + [0] * (len(index) - len(row)) for row in rows])
    mask = index < lengths[:, None]
    loss_mask = mask & (index >= torch.tensor([len(p) for p in prompts])[:, None])
    return TokenBatch(tokens, mask, loss_mask, torch.arange(len(rows)), images=tuple(images))


def logprobs(model: TokenModel, batch: TokenBatch, tokens: int = 60) -> Tensor:
    """Through the micro-batches, several rows or one in each."""
    whole = torch.zeros(batch.tokens.shape)
    assert model.vision is not None
    micros = MicroBatches(
        model.vision.with_image_ids(batch, model.model),
        max_tokens=tokens,
        share_prefixes=can_share_prefixes(model.model.config),
        hidden_size=1,
        packs=model.packs,
    )
    for micro in micros:
        own = model(micro.layout, OutputRequest())["logprobs"]
        whole = whole.index_put((micro.rows[:, None], torch.arange(own.shape[1])), own)
    return whole


async def answers_of(
    engine: InferenceEngine, requests: list[GenerationRequest]
) -> list[GenerationOutput]:
    found = {
        output.request_id: output
        async for outputs in engine.generate(requests)
        for output in outputs
    }
    return [found[request.request_id] for request in requests]
