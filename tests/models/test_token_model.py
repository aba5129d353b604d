from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from skyasync.algorithms.sampled import SampledDistribution
from skyasync.config.schema import SamplingConfig
from skyasync.errors import UserError
from skyasync.models import token_model as model_module
from skyasync.models.backend import ENTROPY, LOGPROBS, OutputRequest
from skyasync.models.heads import load_causal_lm
from skyasync.models.packing import plain_layout
from skyasync.models.token_model import TokenModel, can_share_prefixes, gather_logprobs
from skyasync.workers.policy import PolicyWorker
from tests.workers.conftest import config_for, make_batch

WITH_ENTROPY = OutputRequest.of(LOGPROBS, ENTROPY)


def plain_forward(
    path: str, batch, temperature: float = 1.0, dtype=torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies by the model's own forward with its padding mask, row by row."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    logits = (
        model(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits[:, :-1]
        / temperature
    )
    distribution = torch.distributions.Categorical(logits=logits)
    chosen, entropy = distribution.log_prob(batch.tokens[:, 1:]), distribution.entropy()
    first = torch.zeros(len(batch), 1, dtype=dtype)
    return torch.cat([first, chosen], 1) * batch.loss_mask, torch.cat(
        [first, entropy], 1
    ) * batch.loss_mask


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_equal_those_of_a_plain_forward(
    model_path: str, temperature: float
) -> None:
    batch = make_batch()
    model = TokenModel(load_causal_lm(model_path, torch.float64), SampledDistribution(temperature))
    scores = model(plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask), WITH_ENTROPY)
    logprobs, entropy = plain_forward(model_path, batch, temperature)
    torch.testing.assert_close(scores["logprobs"], logprobs, atol=1e-6, rtol=0)
    torch.testing.assert_close(scores["entropy"], entropy, atol=1e-6, rtol=0)


@torch.no_grad()
def test_logprobs_are_those_of_the_filtered_distribution_and_plain_ones_of_the_models_own(
    model_path: str,
) -> None:
    batch = make_batch()
    layout = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    filtered = SampledDistribution(0.7, top_k=8, logit_bias={3: 1.0})
    model = TokenModel(load_causal_lm(model_path, torch.float64), filtered)
    logits = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)(
        batch.tokens
    ).logits
    logits[:, :, 3] += 1.0
    rows, columns = batch.loss_mask.nonzero().T
    before, targets = logits[rows, columns - 1] / 0.7, batch.tokens[rows, columns]
    kept = before >= before.topk(8).values[:, -1:]
    kept[torch.arange(len(targets)), targets] = True  # the sampled token stays possible
    expected = before.masked_fill(~kept, -torch.inf).log_softmax(-1)[
        torch.arange(len(targets)), targets
    ]
    found = model(layout, WITH_ENTROPY)
    torch.testing.assert_close(found["logprobs"][rows, columns], expected, atol=1e-6, rtol=0)
    assert found["entropy"] is not None and found["entropy"].isfinite().all()
    plain = model(layout, OutputRequest(plain=True))["logprobs"]
    torch.testing.assert_close(plain, plain_forward(model_path, batch)[0], atol=1e-6, rtol=0)


def test_gradients_through_filters_are_finite(model_path: str) -> None:
    batch = make_batch()
    model = TokenModel(
        load_causal_lm(model_path, torch.float32), SampledDistribution(0.7, top_p=0.5, min_p=0.01)
    )
    scores = model(plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask), WITH_ENTROPY)
    (scores["logprobs"].sum() + scores["entropy"].sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_float32_logprobs_are_close_to_float64(model_path: str) -> None:
    batch = make_batch()
    model = TokenModel(load_causal_lm(model_path, torch.float32))
    scores = model(plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask))
    torch.testing.assert_close(
        scores["logprobs"].double(), plain_forward(model_path, batch)[0], atol=2e-5, rtol=0
    )


def test_temperature_zero_is_treated_as_one(model_path: str) -> None:
    batch = make_batch()
    layout = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    model = load_causal_lm(model_path, torch.float32)
    greedy = SampledDistribution.of(SamplingConfig(temperature=0.0, top_k=2))
    assert torch.equal(
        TokenModel(model, greedy)(layout)["logprobs"], TokenModel(model)(layout)["logprobs"]
    )


def test_bfloat16_weights_still_give_a_float32_softmax(model_path: str) -> None:
    batch = make_batch()
    model = TokenModel(load_causal_lm(model_path, torch.bfloat16))
    assert (
        model(plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask))["logprobs"].dtype
        == torch.float32
    )


def test_recomputing_logits_in_pieces_changes_neither_values_nor_gradients(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    layout = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    results = []
    for limit in (1 << 27, 96 * 5):
        monkeypatch.setattr(model_module, "MAX_LOGITS", limit)
        model = TokenModel(load_causal_lm(model_path, torch.float64))
        scores = model(layout, WITH_ENTROPY)
        (scores["logprobs"].sum() + scores["entropy"].sum()).backward()
        results.append((scores["logprobs"].detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-12)


def test_sliding_windows_do_not_share_prefixes() -> None:
    assert can_share_prefixes(LlamaConfig())
    windowed = LlamaConfig()
    windowed.sliding_window = 128
    assert not can_share_prefixes(windowed)
    windowed.layer_types = ["full_attention", "sliding_attention"]
    assert not can_share_prefixes(windowed)


SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip


def save_small(folder: Path, family: str, **settings: int) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **SMALL, **settings)
    ).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("recomputes", [False, True])
def test_routers_add_no_noise_also_where_activations_are_recomputed(
    tmp_path: Path, recomputes: bool
) -> None:
    cfg = config_for(save_small(tmp_path, "phimoe", num_local_experts=4, num_experts_per_tok=2))
    cfg.trainer.policy.gradient_checkpointing = recomputes
    worker, batch = PolicyWorker(cfg, threads=1), make_batch()
    worker.setup()
    layers = [
        m for m in worker.backend.model.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    assert [layer.gradient_checkpointing and layer.training for layer in layers] == [recomputes] * 2
    assert torch.equal(worker.logprobs(batch), worker.logprobs(batch))


@pytest.mark.parametrize("family", ["nemotron", "doge"])
def test_families_that_pass_no_plan_to_their_attention_are_computed_with_masks(
    tmp_path: Path, family: str
) -> None:
    path, batch = save_small(tmp_path, family), make_batch()
    worker = PolicyWorker(config_for(path), threads=1)
    worker.setup()
    expected, _ = plain_forward(path, batch, dtype=torch.float32)
    torch.testing.assert_close(worker.logprobs(batch), expected.detach(), atol=1e-5, rtol=0)


def test_a_family_without_sdpa_is_named(tmp_path: Path) -> None:
    path = save_small(tmp_path, "gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    with pytest.raises(
        UserError, match="models of type gpt_oss have no sdpa attention in transformers"
    ):
        load_causal_lm(path, torch.float32)


def test_dropout_is_switched_off(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    config.attention_dropout = 0.5
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert load_causal_lm(str(tmp_path), torch.float32).config.attention_dropout == 0.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_entropy_that_is_only_logged_leaves_the_gradient_as_it_is(
    model_path: str, temperature: float
) -> None:
    batch = make_batch()
    layout = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
    found = []
    for request in (OutputRequest(), OutputRequest.of(LOGPROBS, ENTROPY, entropy_gradient=False)):
        model = TokenModel(
            load_causal_lm(model_path, torch.float32), SampledDistribution(temperature)
        )
        scores = model(layout, request)
        scores["logprobs"].sum().backward()
        found.append((scores["logprobs"], [p.grad for p in model.parameters()]))
    assert not scores["entropy"].requires_grad
    torch.testing.assert_close(
        scores["entropy"], model(layout, WITH_ENTROPY)["entropy"], atol=1e-6, rtol=0
    )
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_several_tokens_have_the_gradient_that_autograd_finds(kind: torch.dtype) -> None:
    """Bitwise, including a token that occurs twice in a row and excluded tokens."""
    found = []
    for way in (
        gather_logprobs,
        lambda logits, targets: logits.gather(1, targets) - logits.logsumexp(-1, keepdim=True),
    ):
        torch.manual_seed(0)
        logits = torch.randn(50, 90, dtype=kind)
        logits[:, :9] = -torch.inf
        logits.requires_grad_()
        others = torch.stack([torch.randperm(81)[:7] + 9 for _ in range(50)])
        targets = torch.cat([others[:, 3:4], others], 1)
        scores = way(logits, targets)
        (scores * torch.randn(scores.shape, dtype=kind)).sum().backward()
        found.append((scores.detach(), logits.grad))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
