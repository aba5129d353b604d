"""A critic's values, its loss and its head, independent of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModel,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skyasync.config.schema import Config
from skyasync.errors import NonFiniteError, UserError
from skyasync.models import VALUE
from skyasync.models.backend import VALUES, OutputRequest
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp import backend as fsdp
from skyasync.models.heads import HEADS
from skyasync.models.packing import plain_layout
from skyasync.models.token_model import TokenModel
from skyasync.workers.critic import CriticWorker
from skyasync.workers.ranks import split_for_ranks
from tests.models.tiny_models import save_models
from tests.workers.conftest import config_for, make_batch, step_metrics
from tests.workers.processes import Rank, Ranks

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
SHAPES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3_tied": Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **SMALL, head_dim=8, layer_types=["full_attention"] * 2, final_logit_softcapping=30.0
    ),
    "gpt2": GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0
    ),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8, moe_intermediate_size=16),
    "olmoe_of_which_the_library_has_no_classifier": OlmoeConfig(**SMALL, **EXPERTS),
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of causal language models, by name."""
    return save_models(SHAPES, tmp_path_factory.mktemp("shapes"))


def critic_config(path: str) -> Config:
    cfg = config_for(path)
    cfg.trainer.algorithm.advantage_estimator = "gae"
    cfg.trainer.critic.optimizer_config.lr = 1e-2
    cfg.trainer.critic.optimizer_config.max_grad_norm = 0.0
    return cfg


def critic(path: str, **settings: Any) -> CriticWorker:
    cfg = critic_config(path)
    vars(cfg.trainer.critic).update(settings)
    return started(cfg)


def started(cfg: Config) -> CriticWorker:
    worker = CriticWorker(cfg, threads=1)
    worker.setup()
    return worker


def learning(worker: CriticWorker | None = None, seed: int = 0, **size: Any) -> UpdateBatch:
    """A batch with returns; its values are the worker's own, or close to them."""
    batch = make_batch(seed=seed, **size)
    drawn = torch.Generator().manual_seed(seed)
    batch.returns = torch.randn(batch.tokens.shape, generator=drawn) * batch.loss_mask
    batch.values = (
        worker.values(batch) if worker else 0.1 * torch.randn(batch.tokens.shape, generator=drawn)
    )
    return batch


def gradient(worker: CriticWorker) -> Tensor:
    return torch.cat([_whole(p.grad).flatten() for p in worker.backend.model.parameters()])


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_value_is_the_head_on_the_state_before_its_token(
    shapes: dict[str, str], name: str
) -> None:
    batch = make_batch()
    model = HEADS[VALUE].load(shapes[name], torch.float32)
    wrapped = TokenModel(model).eval()
    with torch.no_grad():
        layout = plain_layout(batch.tokens, batch.attention_mask, batch.loss_mask)
        found = wrapped(layout, OutputRequest.of(VALUES))[VALUES]
        backbone = AutoModel.from_pretrained(shapes[name], dtype=torch.float32).eval()
        states = backbone(
            batch.tokens, attention_mask=batch.attention_mask.long()
        ).last_hidden_state
        expected = (states @ model.score.weight[0]).roll(1, 1) * batch.loss_mask
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert float(found.abs().max()) > 1e-3


def test_values_do_not_depend_on_packing_or_micro_batches(
    untied_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, worker = make_batch(groups=5), critic(untied_model)
    packed = worker.values(batch)
    worker.cfg.trainer.micro_forward_batch_size_per_gpu = 1
    torch.testing.assert_close(worker.values(batch), packed, atol=1e-6, rtol=0)
    monkeypatch.setattr(fsdp, "can_share_prefixes", lambda config: False)
    torch.testing.assert_close(worker.values(batch), packed, atol=1e-6, rtol=0)
    assert not packed[~batch.loss_mask].any()


# ---------------------------------------------------------------- training


def test_the_gradient_equals_one_written_by_hand(untied_model: str) -> None:
    worker = critic(untied_model, value_clip=0.2)
    batch = learning()
    model = HEADS[VALUE].load(untied_model, torch.float32)
    states = model.model(batch.tokens, attention_mask=batch.attention_mask.long()).last_hidden_state
    values = (states @ model.score.weight[0]).roll(1, 1)
    clipped = batch.values + (values - batch.values).clamp(-0.2, 0.2)
    loss = torch.maximum((values - batch.returns) ** 2, (clipped - batch.returns) ** 2) / 2
    (batch.loss_weights * loss).sum().backward()
    worker.forward_backward(batch)
    assert (
        distance(gradient(worker), torch.cat([p.grad.flatten() for p in model.parameters()])) < 1e-5
    )
    metrics = step_metrics(worker)
    mask = batch.loss_mask
    bounded = ((values - batch.values).abs() > 0.2) & (
        (clipped - batch.returns) ** 2 > (values - batch.returns) ** 2
    )
    assert metrics["loss"] == pytest.approx((batch.loss_weights * loss).sum().item(), rel=1e-5)
    assert metrics["clip_frac"] == pytest.approx(float(bounded[mask].double().mean()))
    assert 0 < metrics["clip_frac"] < 1
    assert set(metrics) == {"loss", "tokens", "row_tokens", "clip_frac", "grad_norm", "lr"}


def test_no_clip_is_a_squared_error(untied_model: str) -> None:
    worker = critic(untied_model, value_clip=0.0)
    batch, current = learning(), worker.values(learning())
    worker.forward_backward(batch)
    metrics = step_metrics(worker)
    expected = float((batch.loss_weights * (current - batch.returns) ** 2 / 2).sum())
    assert (metrics["loss"], metrics["clip_frac"]) == (pytest.approx(expected, rel=1e-5), 0.0)


def test_it_learns_what_is_always_the_same(untied_model: str) -> None:
    worker, losses = critic(untied_model, value_clip=0.0), []
    for _ in range(20):
        batch = learning(worker)
        batch.returns = 0.7 * batch.loss_mask
        worker.forward_backward(batch)
        losses.append(worker.optimizer_step()["loss"])
    assert losses[-1] < losses[0] / 20


@pytest.mark.parametrize("cut", [{"micro_batch_tokens": 40}, {"micro_train_batch_size_per_gpu": 1}])
def test_the_gradient_does_not_depend_on_the_micro_batches(
    untied_model: str, cut: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = learning(groups=5)
    whole, pieces, alone = critic(untied_model), critic(untied_model), critic(untied_model)
    whole.cfg.trainer.micro_batch_tokens = 100_000
    vars(pieces.cfg.trainer).update(cut)
    whole.forward_backward(batch)
    pieces.forward_backward(batch)
    monkeypatch.setattr(fsdp, "can_share_prefixes", lambda config: False)
    alone.forward_backward(batch)
    assert distance(gradient(pieces), gradient(whole)) < 1e-6
    assert distance(gradient(alone), gradient(whole)) < 1e-6


def gradient_of_rank(rank: Rank) -> tuple[Any, dict[str, float]]:
    batch = learning(groups=5)
    rank.worker.forward_backward(batch.select(split_for_ranks(batch, rank.count)[rank.rank]).trim())
    return gradient(rank.worker).numpy(), step_metrics(rank.worker)


@pytest.mark.parametrize("name", ["llama", "qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_the_gradient_on_several_ranks_is_that_of_one(
    shapes: dict[str, str], ranks: Callable[[int], Ranks], name: str, count: int
) -> None:
    cfg = critic_config(shapes[name])
    one = started(cfg)
    one.forward_backward(learning(groups=5))
    expected = gradient(one)
    metrics = step_metrics(one)
    ranks(count).set_up(CriticWorker, cfg)
    for found, other in ranks(count).call(gradient_of_rank):
        assert distance(torch.from_numpy(found), expected) < 1e-6
        assert other == pytest.approx(metrics, rel=1e-5)


def test_bfloat16_has_float32_master_weights_and_float32_values(untied_model: str) -> None:
    cfg = critic_config(untied_model)
    cfg.trainer.critic.model.path, cfg.trainer.critic.model.dtype = untied_model, "bfloat16"
    cfg.trainer.critic.optimizer_config.lr = 1e-5
    worker, exact = started(cfg), critic(untied_model)
    batch = learning(worker)
    difference = (batch.values - exact.values(batch)).abs().max()
    assert 0 < float(difference) < 0.02
    assert not torch.equal(batch.values, batch.values.bfloat16().float()), (
        "the sum of the head is not rounded"
    )
    before = _whole(worker.backend.model.model.score.weight)
    worker.forward_backward(batch)
    worker.optimizer_step()
    assert all(p.dtype == torch.float32 for p in worker.backend.model.parameters())
    assert not torch.equal(_whole(worker.backend.model.model.score.weight), before)


def test_training_goes_on_from_a_checkpoint_bit_by_bit(untied_model: str, tmp_path: Path) -> None:
    original = critic(untied_model)
    _steps(original, 0, 2)
    original.save(str(tmp_path))
    expected = _steps(original, 2, 4)
    resumed = critic(untied_model)
    resumed.load(str(tmp_path))
    assert _steps(resumed, 2, 4) == expected
    for name, parameter in resumed.backend.model.named_parameters():
        assert torch.equal(parameter, original.backend.model.get_parameter(name))


def _steps(worker: CriticWorker, start: int, end: int) -> list[dict[str, float]]:
    found = []
    for seed in range(start, end):
        worker.forward_backward(learning(worker, seed=seed))
        found.append(worker.optimizer_step())
    return found


def test_a_checkpoint_of_another_model_is_refused_by_the_critics_key(
    untied_model: str, shapes: dict[str, str], tmp_path: Path
) -> None:
    critic(untied_model).save(str(tmp_path))
    with pytest.raises(UserError, match=r"trainer\.critic\.model\.path.* the critic"):
        critic(shapes["llama"]).load(str(tmp_path))


def test_returns_that_are_not_finite_change_no_weight(untied_model: str) -> None:
    worker = critic(untied_model)
    batch, before = learning(worker), gradient_free(worker)
    batch.returns[batch.loss_mask] = float("nan")
    worker.forward_backward(batch)
    with pytest.raises(NonFiniteError, match="loss"):
        worker.optimizer_step()
    assert torch.equal(gradient_free(worker), before)


def gradient_free(worker: CriticWorker) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in worker.backend.model.parameters()])


def test_a_batch_without_returns_is_refused(untied_model: str) -> None:
    with pytest.raises(ValueError, match="values and returns"):
        critic(untied_model).forward_backward(make_batch())
