"""A tiny random Llama, tied or untied, as a Hugging Face folder, and updates of its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from skyasync.weight_sync.transfers.file import write_weights
from skyasync.weight_sync.update import WeightUpdate

VOCABULARY = 96
EOS = 1


def save_model(folder: Path, *, tied: bool, seed: int = 0) -> LlamaForCausalLM:
    """Large initial weights, so that the next token is far from uniform and every error is visible."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied,
        initializer_range=0.15, bos_token_id=0, eos_token_id=EOS, pad_token_id=EOS, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", bos_token="w0").save_pretrained(
        folder
    )
    return model


@torch.no_grad()
def perturb(model: LlamaForCausalLM, seed: int, size: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += size * torch.randn(parameter.shape, generator=generator)


def publish(model: LlamaForCausalLM, version: int) -> WeightUpdate:
    """The weights as the trainer publishes them: a tied output layer is not written twice."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return WeightUpdate(
        version=version, backend="shared_memory", info={"path": write_weights(weights)}
    )


@torch.no_grad()
def token_logprobs(model: LlamaForCausalLM, tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probability of each token after the first, ``[length - 1]``."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
