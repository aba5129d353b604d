"""Tiny vision-language models with random weights that images really change, one with M-RoPE and one without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image as PIL
from torch import Tensor
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedModel,
)

from skyasync.examples.vision.model import qwen3_vl, vision_tokenizer
from skyasync.inference.interface import GenerationOutput, GenerationRequest, InferenceEngine
from skyasync.models.backend import OutputRequest
from skyasync.models.batch import TokenBatch
from skyasync.models.images import Image, Images, read_image
from skyasync.models.packing import MicroBatches
from skyasync.models.token_model import TokenModel, can_share_prefixes
from skyasync.models.vision import processor_of

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
        "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": True,  # vLLM reads it here
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


def conversation(images: int) -> list[dict[str, object]]:
    return [{"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": "How many discs?"}]}]


def prompt(folder: str, images: Images) -> list[int]:
    processor = processor_of(folder)
    tokenizer = processor._processor.tokenizer
    plain = tokenizer.apply_chat_template(
        conversation(len(images)), tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return processor.expand(plain, images).tolist()


def as_batch(prompts: list[list[int]], answers: list[list[int]], images: list[Images]) -> TokenBatch:
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
        model.vision.marked(batch, model.model),
        max_tokens=tokens,
        share_prefixes=can_share_prefixes(model.model.config),
        hidden_size=1,
        packs=model.packs,
    )
    for micro in micros:
        own = model(micro.layout, OutputRequest())["logprobs"]
        whole = whole.index_put((micro.rows[:, None], torch.arange(own.shape[1])), own)
    return whole


async def answers_of(engine: InferenceEngine, requests: list[GenerationRequest]) -> list[GenerationOutput]:
    found = {output.request_id: output async for outputs in engine.generate(requests) for output in outputs}
    return [found[request.request_id] for request in requests]
