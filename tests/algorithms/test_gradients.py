"""Gradients of every loss against finite differences, with stop-gradients fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skyasync.algorithms import KL_ESTIMATORS, POLICY_LOSSES
from skyasync.algorithms.binding import bind
from skyasync.algorithms.kl import kl_estimate
from skyasync.algorithms.values import clipped_value_loss
from tests.algorithms.batches import config, prepared, random_batch

LOSSES = POLICY_LOSSES.names()
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gspo", {"token_gradient": True}), ("gspo", {"mean_advantage": True}), ("gspo", {"product": True}),
    ("sapo", {"sequence_level": True}), ("cispo", {"unified_mask": True}), ("dppo", {"ratio_cap": 1.5}),
    ("decoupled_ppo", {"truncated": True, "dual_clip": 1.1}),
]  # fmt: skip
DETACHED_WEIGHT = ["vanilla", "tis", "cispo", "topr", "rollout_is", "vespo"]


def loss_function(name: str, extra: dict[str, Any]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The named loss of a random batch as a function of the current log-probabilities, and these."""
    cfg = config(policy_loss_type=name, off_policy_correction="none", extra=extra)
    batch, bound = prepared(cfg, random_batch(seed=3)), bind(POLICY_LOSSES[name], cfg)
    tensors = {
        "proximal": batch.proximal_logprobs, "anchor": batch.proximal_logprobs, "behaviour": batch.behaviour_logprobs,
        "advantages": batch.advantages, "mask": batch.loss_mask, "selection": batch.selection,
    }  # fmt: skip

    def function(current: Tensor) -> Tensor:
        outcome = bound(tensors | {"current": current})
        loss = outcome[0] if isinstance(outcome, tuple) else outcome
        return torch.where(batch.loss_mask, loss, 0)

    return function, batch.current


@pytest.mark.parametrize(("name", "extra"), [*((name, {}) for name in LOSSES), *VARIANTS])
def test_every_loss_passes_gradcheck(
    name: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, start = loss_function(name, extra)
    detach = torch.Tensor.detach

    def with_fixed_gradients(current: Tensor) -> Tensor:
        """The loss with its stop-gradients fixed at ``start``: the function whose derivative the gradient is."""
        with monkeypatch.context() as patch:
            patch.setattr(
                torch.Tensor, "detach", lambda t: start.clone() if t is current else detach(t)
            )
            return function(current)

    assert torch.autograd.gradcheck(
        with_fixed_gradients, start.clone().requires_grad_(), eps=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("name", DETACHED_WEIGHT)
def test_the_gradient_of_a_detached_weight_is_the_loss_over_the_logprob(name: str) -> None:
    function, start = loss_function(name, {})
    current = start.clone().requires_grad_()
    loss = function(current)
    loss.sum().backward()
    torch.testing.assert_close(current.grad * start, loss.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_kl_estimators_pass_gradcheck(name: str) -> None:
    batch = random_batch(seed=2)
    current = batch.current.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda c: kl_estimate(c, batch.reference_logprobs, name), current
    )


@pytest.mark.parametrize(
    "name", sorted(n for n in KL_ESTIMATORS.names() if n.endswith("straight_through"))
)
def test_straight_through_has_its_own_value_and_the_gradient_of_k2(name: str) -> None:
    batch = random_batch(seed=2)
    current = batch.current.clone().requires_grad_()
    value = kl_estimate(current, batch.reference_logprobs, name)
    plain = kl_estimate(batch.current, batch.reference_logprobs, name.split("_")[0])
    torch.testing.assert_close(value.detach(), plain)
    (slope,) = torch.autograd.grad(value.sum(), current)
    torch.testing.assert_close(slope, batch.current - batch.reference_logprobs)


def test_the_value_loss_passes_gradcheck() -> None:
    batch = random_batch(seed=4)
    values = batch.current.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: clipped_value_loss(v, batch.proximal_logprobs, batch.rewards, clip=0.2)[0], values
    )
