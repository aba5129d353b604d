"""The contract of every training backend, for the default one and for a simple one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyasync.algorithms.sampled import SampledDistribution
from skyasync.config.schema import OptimizerConfig
from skyasync.errors import NonFiniteError
from skyasync.models import VALUE
from skyasync.models.backend import (
    COMPUTED_TOKENS,
    ENTROPY,
    LOGPROBS,
    MODEL,
    ROW_TOKENS,
    TOKEN_LOGPROBS,
    TOP_K,
    VALUE_HEAD,
    VALUES,
    JointLoss,
    LossFn,
    ModelBackend,
    ModelSpec,
    OutputRequest,
    RankContext,
)
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.workers.critic import ValueLoss
from skyasync.workers.policy import PolicyLoss, PolicyWorker
from tests.models.reference_backend import ReferenceBackend
from tests.workers.conftest import config_for, make_batch

BACKENDS: dict[str, tuple[type[ModelBackend], dict[str, Any]]] = {
    "reference": (ReferenceBackend, {}),
    "fsdp": (FSDPBackend, {}),
    "fsdp_sharded": (FSDPBackend, {"cpu_offload": "parameters"}),
}
Load = Callable[..., ModelBackend]
#: One step of AdamW is g / (|g| + 1), from which the gradient can be read.
LINEAR = OptimizerConfig(lr=1.0, adam_betas=[0.0, 0.0], eps=1.0, max_grad_norm=0.0)


@pytest.fixture(params=list(BACKENDS))
def load(request: pytest.FixtureRequest, untied_model: str) -> Iterator[Load]:
    """``load(optimizers={...})``: a backend of this kind, with a tiny model."""
    kind, options = BACKENDS[request.param]

    def loaded(**more: Any) -> ModelBackend:
        cfg = config_for(untied_model)
        cfg.trainer.micro_batch_tokens = more.pop("micro_batch_tokens", 64)
        spec = ModelSpec(
            "policy",
            "trainer.policy",
            untied_model,
            cfg.trainer,
            **{"optimizers": {MODEL: LINEAR}, **more},
        )
        backend = kind()
        backend.load(replace(spec, **options), RankContext())
        return backend

    return loaded


def weights(backend: ModelBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def gradient(
    backend: ModelBackend, *batches: UpdateBatch, loss: LossFn | None = None, scale: float = 1.0
) -> dict[str, Tensor]:
    """By name, read from one optimizer step (``LINEAR``)."""
    before = weights(backend)
    for batch in batches:
        backend.forward_backward(batch, loss or policy_loss())
    backend.optimizer_step({MODEL: 1.0, VALUE_HEAD: 1.0}, scale)
    moves = {name: before[name] - tensor for name, tensor in backend.weights()}
    return {name: move / (1 - move.abs()) for name, move in moves.items()}


def policy_loss() -> PolicyLoss:
    return PolicyLoss(config_for(""))


def value_loss(**options: Any) -> ValueLoss:
    return ValueLoss(config_for("").trainer.critic, **options)


def learning(seed: int = 0) -> UpdateBatch:
    batch = make_batch(seed=seed)
    drawn = torch.Generator().manual_seed(seed)
    batch.returns, batch.values = (
        torch.randn(batch.tokens.shape, generator=drawn) * batch.loss_mask for _ in range(2)
    )
    return batch


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=2e-6, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def plain(path: str, batch: UpdateBatch, temperature: float = 1.0) -> tuple[Any, Tensor, Tensor]:
    """transformers' model, and what its states give: log-probabilities ``[rows, length, vocabulary]``, states."""
    model = AutoModelForCausalLM.from_pretrained(path)
    states = model.model(
        batch.tokens, attention_mask=batch.attention_mask.long()
    ).last_hidden_state.roll(1, 1)
    return model, (model.lm_head(states) / temperature).log_softmax(-1), states


def test_outputs_are_those_of_the_plain_model(load: Load, untied_model: str) -> None:
    batch = make_batch()
    tokens = torch.randint(
        0, 96, (*batch.tokens.shape, 3), generator=torch.Generator().manual_seed(1)
    )
    request = OutputRequest.of(LOGPROBS, ENTROPY, TOP_K, TOKEN_LOGPROBS, top_k=2, token_ids=tokens)
    backend = load(distribution=SampledDistribution(0.7))
    _, logprobs, _ = plain(untied_model, batch, 0.7)
    most, likeliest = logprobs.topk(2)
    expected = {
        LOGPROBS: logprobs.gather(-1, batch.tokens[..., None]),
        ENTROPY: -(logprobs.exp() * logprobs).sum(-1, keepdim=True),
        TOP_K: torch.cat([likeliest.float(), most], -1),
    }
    whole = backend.forward(
        batch, replace(request, names=request.names - {TOKEN_LOGPROBS}, token_ids=None)
    )
    for name, value in expected.items():
        found = whole[name] if whole[name].dim() == 3 else whole[name][..., None]
        torch.testing.assert_close(
            found, value.where(batch.loss_mask[..., None], 0.0), atol=2e-5, rtol=0
        )
    assert whole.keys() == expected.keys()


def test_plain_log_probabilities_are_at_temperature_one(load: Load, untied_model: str) -> None:
    batch = make_batch()
    _, logprobs, _ = plain(untied_model, batch)
    expected = logprobs.gather(-1, batch.tokens[..., None])[..., 0] * batch.loss_mask
    found = load(distribution=SampledDistribution(0.5)).forward(batch, OutputRequest(plain=True))[
        LOGPROBS
    ]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_a_batch_without_rows_has_outputs_without_rows(load: Load) -> None:
    none = make_batch().select(torch.zeros(0, dtype=torch.int64))
    assert load().forward(none, OutputRequest())[LOGPROBS].shape == none.tokens.shape


@pytest.mark.parametrize("tokens", [40, 10_000])
def test_the_policys_gradient_is_that_of_its_loss_written_by_hand(
    load: Load, untied_model: str, tokens: int
) -> None:
    batch = make_batch()
    model, logprobs, _ = plain(untied_model, batch)
    current = logprobs.gather(-1, batch.tokens[..., None])[..., 0]
    batch.behaviour_logprobs = current.detach() * batch.loss_mask  # no correction
    ratio = (current - current.detach()).exp()
    loss = -(batch.loss_weights * ratio * batch.advantages).sum()
    loss.backward()
    by_hand = {name: p.grad for name, p in model.named_parameters()}
    backend = load(micro_batch_tokens=tokens)
    close(gradient(backend, batch), by_hand)
    batch.proximal_logprobs = current.detach() * batch.loss_mask
    fresh = load(micro_batch_tokens=tokens)
    fresh.forward_backward(batch, policy_loss())
    metrics = fresh.optimizer_step({MODEL: 0.0})[MODEL]
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["tokens"] == int(batch.loss_mask.sum())
    norm = torch.cat([g.flatten() for g in by_hand.values()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_joint_loss_adds_its_share_of_the_value_losss_gradient(
    load: Load, untied_model: str, share: float
) -> None:
    batch, both = learning(), {MODEL: LINEAR, VALUE_HEAD: LINEAR}
    alone = gradient(load(), batch)
    backend = load(optimizers=both)
    values = backend.forward(batch, OutputRequest.of(VALUES))[VALUES]
    found = gradient(
        backend, batch, loss=JointLoss(policy_loss(), value_loss(part=VALUE_HEAD, gradient=share))
    )
    moved = {name: (found[name] - alone[name]).abs().max() for name in alone}
    assert max(moved.values()) < 1e-6 if not share else moved["model.embed_tokens.weight"] > 1e-5
    assert not torch.equal(backend.forward(batch, OutputRequest.of(VALUES))[VALUES], values)


def test_a_value_head_that_learns_alone_leaves_the_model(load: Load) -> None:
    backend = load(optimizers={MODEL: LINEAR, VALUE_HEAD: LINEAR})
    before = weights(backend)
    backend.forward_backward(learning(), value_loss(part=VALUE_HEAD, gradient=0.0))
    assert backend.optimizer_step({MODEL: 1.0, VALUE_HEAD: 1.0}).keys() == {VALUE_HEAD}
    assert backend.step == 0 and all(
        torch.equal(before[name], tensor) for name, tensor in backend.weights()
    )


def test_a_critics_gradient_is_that_of_the_value_loss(load: Load, untied_model: str) -> None:
    batch = learning()
    backend = load(head=VALUE)
    head = dict(backend.weights())["score.weight"].clone().requires_grad_()
    model, _, states = plain(untied_model, batch)
    values = (states @ head[0]).squeeze(-1)
    torch.testing.assert_close(
        backend.forward(batch, OutputRequest.of(VALUES))[VALUES],
        values.detach() * batch.loss_mask,
        atol=2e-6,
        rtol=0,
    )
    clipped = batch.values + (values - batch.values).clamp(-0.2, 0.2)
    loss = torch.maximum((values - batch.returns) ** 2, (clipped - batch.returns) ** 2) / 2
    (batch.loss_weights * loss).sum().backward()
    by_hand = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    close(gradient(backend, batch, loss=value_loss()), by_hand | {"score.weight": head.grad})


def test_gradients_of_several_calls_are_added_up_and_scaled(load: Load) -> None:
    first, second = make_batch(seed=1), make_batch(seed=2)
    one, two = gradient(load(), first), gradient(load(), second)
    expected = {name: (one[name] + two[name]) / 4 for name in one}
    close(gradient(load(), first, second, scale=0.25), expected)


def test_outputs_that_are_asked_for_are_of_before_the_step(load: Load) -> None:
    backend, batch = load(), make_batch()
    before = backend.forward(batch, OutputRequest())[LOGPROBS]
    found = backend.forward_backward(batch, policy_loss(), returns={LOGPROBS})
    assert found.keys() == {LOGPROBS}
    torch.testing.assert_close(found[LOGPROBS], before, atol=1e-6, rtol=0)
    assert backend.forward_backward(batch, policy_loss()) == {}


def test_a_dropped_gradient_leaves_no_trace(load: Load) -> None:
    backend, batch = load(), make_batch()
    before = weights(backend)
    backend.forward_backward(make_batch(seed=3), policy_loss())
    assert backend.examine() == ""
    backend.drop_gradient()
    assert backend.step == 0 and all(
        torch.equal(before[name], tensor) for name, tensor in backend.weights()
    )
    close(gradient(backend, batch), gradient(load(), batch))
    assert backend.step == 1


def test_a_loss_that_is_not_finite_changes_nothing(load: Load) -> None:
    backend, batch = load(), make_batch()
    before = weights(backend)
    batch.advantages[batch.loss_mask] = float("nan")
    backend.forward_backward(batch, policy_loss())
    assert "not finite" in backend.examine()
    with pytest.raises(NonFiniteError, match="not finite"):
        backend.optimizer_step({MODEL: 1.0})
    assert backend.step == 0 and all(
        torch.equal(before[name], tensor) for name, tensor in backend.weights()
    )
    close(gradient(backend, make_batch()), gradient(load(), make_batch()))


def test_the_gradient_is_clipped_to_its_norm(load: Load) -> None:
    batch = make_batch()
    whole = gradient(load(), batch)
    norm = torch.cat([g.flatten() for g in whole.values()]).norm()
    clipped = gradient(
        load(optimizers={MODEL: replace(LINEAR, max_grad_norm=float(norm) / 2)}), batch
    )
    close(clipped, {name: g / 2 for name, g in whole.items()})


def test_weights_are_those_of_the_files_by_their_names(load: Load, untied_model: str) -> None:
    expected = dict(AutoModelForCausalLM.from_pretrained(untied_model).named_parameters())
    found = weights(load())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("both", [False, True])
def test_training_goes_on_from_a_checkpoint_bitwise(load: Load, tmp_path: Path, both: bool) -> None:
    adam = OptimizerConfig(lr=1e-2)
    optimizers = {MODEL: adam, VALUE_HEAD: adam} if both else {MODEL: adam}
    loss: LossFn = JointLoss(policy_loss(), value_loss(part=VALUE_HEAD)) if both else policy_loss()
    backend, other = load(optimizers=optimizers), load(optimizers=optimizers)

    def steps(which: ModelBackend, *seeds: int) -> list[Any]:
        found = []
        for seed in seeds:
            which.forward_backward(learning(seed), loss)
            found.append(which.optimizer_step({MODEL: 1e-2, VALUE_HEAD: 1e-2}))
        return found

    steps(backend, 0, 1)
    assert not backend.save(tmp_path).problem
    steps(other, 5)
    other.restore(tmp_path)
    assert other.step == 2
    assert steps(other, 2, 3) == steps(backend, 2, 3)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(backend.weights(), other.weights(), strict=True)
    )


def test_a_first_decay_rate_is_that_of_one_step(load: Load) -> None:
    """With rates d1 and d2 of the first moment AdamW moves by m / (1 - d2**2), m = d2 (1 - d1) g1 + (1 - d2) g2."""
    gradients = [gradient(load(), learning(seed)) for seed in (0, 1)]
    backend = load(optimizers={MODEL: replace(LINEAR, adam_betas=[0.8, 0.0], eps=1.0)})
    for seed, lr, beta1 in ((0, 0.0, None), (1, 1.0, 0.5)):
        backend.forward_backward(learning(seed), policy_loss())
        before = weights(backend)
        backend.optimizer_step({MODEL: lr}, beta1=beta1)
    for name, tensor in backend.weights():
        first, second = (found[name] for found in gradients)
        moment = (0.5 * 0.2 * first + 0.5 * second) / (1 - 0.5**2)
        torch.testing.assert_close(
            before[name] - tensor, moment / (1 + second.abs()), atol=1e-6, rtol=1e-3
        )
    backend.forward_backward(learning(2), policy_loss())
    backend.optimizer_step({MODEL: 0.0})
    assert {tuple(group["betas"]) for group in optimizer_of(backend).param_groups} == {
        (0.8, 0.0)
    }, "the settings' again"


def optimizer_of(backend: Any) -> torch.optim.Optimizer:
    return backend.optimizers[MODEL] if hasattr(backend, "optimizers") else backend.optimizer


def test_a_round_trip_through_host_memory_changes_no_bit(load: Load) -> None:
    backend, other = load(), load()
    for each in (backend, other):
        each.forward_backward(make_batch(), policy_loss())
        each.optimizer_step({MODEL: 1e-2})
    backend.offload()
    backend.onload()
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(backend.weights(), other.weights(), strict=True)
    )
    close(gradient(backend, make_batch(seed=4)), gradient(other, make_batch(seed=4)))


def test_an_exported_folder_is_the_model(load: Load, tmp_path: Path) -> None:
    backend = load()
    backend.forward_backward(make_batch(), policy_loss())
    backend.optimizer_step({MODEL: 1e-2})
    backend.export(tmp_path)
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in backend.weights())


def test_a_worker_trains_alike_with_any_backend(untied_model: str) -> None:
    class Plain(PolicyWorker):
        def new_backend(self) -> ModelBackend:
            return ReferenceBackend()

    found = []
    for worker in (
        PolicyWorker(config_for(untied_model), threads=1),
        Plain(config_for(untied_model)),
    ):
        worker.setup()
        metrics = [worker.update_policy(make_batch(seed=seed)) for seed in (0, 1)]
        found.append((metrics, worker.score([[5, 6, 7, 8]])[0]))
    for ours, plain in zip(found[0][0], found[1][0], strict=True):
        common = {
            name: value for name, value in ours.items() if name not in (ROW_TOKENS, COMPUTED_TOKENS)
        }
        assert common == pytest.approx(plain, rel=1e-3, abs=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-3)


def test_what_a_backend_lacks_is_named() -> None:
    class Incomplete(ModelBackend):
        def load(self, spec: ModelSpec, ranks: RankContext) -> None: ...
        def forward(self, batch: Any, request: OutputRequest) -> dict[str, Tensor]:
            return {}

        def sharded_weights(self) -> dict[str, Tensor]:
            return {}

    for call in (
        lambda b: b.optimizer_step({}),
        lambda b: b.save(Path()),
        lambda b: b.offload(),
        lambda b: b.adapter(),
    ):
        with pytest.raises(NotImplementedError, match="Incomplete does not"):
            call(Incomplete())
