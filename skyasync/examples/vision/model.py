"""A Qwen3-VL of 0.75 million parameters, made on this machine: nothing is downloaded.

    python -m skyasync.examples.vision.model      # the folder, made in about 15 seconds of a core

The supervised warm start stops early on purpose: sampled answers are right a little more often than
by chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from skyasync.examples import tiny_models
from skyasync.examples.tiny_models import (
    Row,
    SFTSteps,
    byte_level_bpe,
    cache_folder,
    fine_tune,
    made_once,
)
from skyasync.examples.vision.discs import MOST, QUESTION, SIZE, disc_image

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [f"user\n{QUESTION}\nassistant\n{number}\nsystem\n" for number in range(10)]


def vision_tokenizer(
    special: tuple[str, ...] = SPECIAL, template: str = TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE; each of ``special`` is one token."""
    tokenizer = byte_level_bpe(CORPUS * 20, vocab_size=400, rarest_merge=20, template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def qwen3_vl(seed: int = 0) -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    """The model with random weights, and its processor."""
    tokenizer = vision_tokenizer()
    start, end, image, video = (
        cast(int, tokenizer.convert_tokens_to_ids(token)) for token in SPECIAL
    )
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    # Called edges, but numbers of pixels: images are not resized between these bounds.
    area = {"shortest_edge": SIZE * SIZE, "longest_edge": 4 * SIZE * SIZE}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches, size=area, **normal),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**patches, size=area, **normal),
        chat_template=TEMPLATE,
    )
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays the same
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, processor


def lessons() -> Iterator[Row]:
    """Endless images with their answers, of seeds that no prompt has."""
    assert MOST < 10  # an answer is one token
    for image, discs in map(disc_image, count(2 << 20)):  # above those of train and evaluation
        yield {"prompt": QUESTION, "images": [image], "completion": str(discs)}


def build(*, out: str | None = None, steps: int = 60, seed: int = 0) -> str:
    """Make the model if it does not exist yet; returns its folder."""
    digest = hashlib.sha256()
    for source in (__file__, Path(__file__).with_name("discs.py"), tiny_models.__file__):
        digest.update(Path(source).read_bytes())
    digest.update(f"{steps} {seed}".encode())

    def make(folder: Path) -> None:
        model, processor = qwen3_vl(seed)
        with TemporaryDirectory() as start:
            model.save_pretrained(start)
            processor.save_pretrained(start)
            fine_tune(Path(start), folder, lessons(), SFTSteps(steps, batch_size=64, lr=2e-3))

    folder = cache_folder() / f"vision-{digest.hexdigest()[:12]}"
    if out:
        folder = Path(out)
    return str(made_once(folder, make))


if __name__ == "__main__":
    print(build())
