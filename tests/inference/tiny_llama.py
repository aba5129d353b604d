"""Tiny random Llamas with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = 256
VOCABULARY = 260


def save_tiny_llama(folder: Path, *, tied: bool, seed: int = 0, head_dim: int = 8) -> str:
    """A 2-layer Llama (4 query heads over 2 key heads) whose distributions are far from uniform.

    vLLM's kernels need a ``head_dim`` of 32 at least.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4 * head_dim,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return str(folder)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token i < 256 is byte i (in the alphabet's order); 256 is the end of a sequence, the rest are spare."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<spare1>", "<spare2>", "<spare3>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
