"""Models that cap or scale their logits: log-probabilities, entropies and gradients are those of their own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteMoeConfig,
    PreTrainedConfig,
)

from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import EngineConfig
from skyasync.models import token_model as logits_module
from skyasync.models import token_model as model_module
from skyasync.models.heads import load_causal_lm
from skyasync.models.packing import plain_layout, sequences_as_batch
from skyasync.models.token_model import TokenModel
from tests.models.test_token_model import WITH_ENTROPY
from tests.models.tiny_models import save_models
from tests.workers.conftest import make_batch
from tests.workers.test_critic import SMALL

WIDE: dict[str, Any] = {**SMALL, "initializer_range": 0.5}
SHAPES: dict[str, PreTrainedConfig] = {
    "gemma2": Gemma2Config(
        **WIDE, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gemma3": Gemma3TextConfig(
        **WIDE, head_dim=8, final_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "cohere": CohereConfig(**WIDE, logit_scale=0.25, bos_token_id=1, eos_token_id=2),
    "granite": GraniteConfig(**WIDE, logits_scaling=4.0),
    "granite_moe": GraniteMoeConfig(
        **WIDE, logits_scaling=4.0, num_local_experts=4, num_experts_per_tok=2
    ),
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_models(SHAPES, tmp_path_factory.mktemp("scaled"))


def dtype_of(name: str) -> torch.dtype:
    """The library's experts have no float64."""
    return torch.float32 if "moe" in name else torch.float64


def library(
    path: str, batch: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities and entropies by the library, and the gradient of their sums."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    logits = (
        model(input_ids=batch.tokens, attention_mask=batch.attention_mask.long())
        .logits[:, :-1]
        .double()
    )
    logprobs = logits.log_softmax(-1)
    first = torch.zeros(len(batch), 1, dtype=torch.float64)
    chosen = (
        torch.cat([first, logprobs.gather(2, batch.tokens[:, 1:, None])[..., 0]], 1)
        * batch.loss_mask
    )
    entropy = torch.cat([first, -(logprobs.exp() * logprobs).sum(-1)], 1) * batch.loss_mask
    (chosen.sum() + entropy.sum()).backward()
    return chosen, entropy, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("limit", [1 << 27, 96 * 5])
@pytest.mark.parametrize("name", SHAPES)
def test_the_model_says_what_the_logits_are(
    shapes: dict[str, str], name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "MAX_LOGITS", limit)
    batch, dtype = make_batch(), dtype_of(name)
    model = TokenModel(load_causal_lm(shapes[name], dtype))
    scores = model(plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask), WITH_ENTROPY)
    (scores["logprobs"].sum() + scores["entropy"].sum()).backward()
    logprobs, entropy, gradients = library(shapes[name], batch, dtype)
    near = 1e-6 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(scores["logprobs"].double(), logprobs, atol=near, rtol=0)
    torch.testing.assert_close(scores["entropy"].double(), entropy, atol=near, rtol=0)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for (parameter, found), expected in zip(model.model.named_parameters(), gradients, strict=True):
        assert float((found.grad - expected).norm() / norm) < 1e-6, parameter


def test_a_linear_head_alone_would_say_something_else(
    shapes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    layout = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    for name, path in shapes.items():
        model = TokenModel(load_causal_lm(path, torch.float32))
        right = model(layout)["logprobs"]
        with monkeypatch.context() as changed, torch.no_grad():
            changed.setattr(logits_module, "NOT_LINEAR", ())
            assert float((model(layout)["logprobs"] - right).abs().max()) > 0.01, name


async def test_the_embedded_engine_says_the_same(shapes: dict[str, str]) -> None:
    tokens = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    for path in shapes.values():
        engine = TransformersEngine(
            EngineConfig(path, threads=1, max_model_len=64, max_num_seqs=4, kv_cache_gb=0.01)
        )
        await engine.start()
        found = await engine.score(tokens)
        await engine.shutdown()
        model = TokenModel(load_causal_lm(path, torch.float32))
        batch = sequences_as_batch(tokens)
        ours = model(plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask))["logprobs"]
        for i, sequence in enumerate(found):
            assert sequence == pytest.approx(ours[i, 1 : len(tokens[i])].tolist(), abs=1e-5)
