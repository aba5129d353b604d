"""KL estimates against the exact divergence of small distributions, penalties, controllers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from skyasync import UserError, load_config
from skyasync.algorithms import KL_CONTROLLERS
from skyasync.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    bernoulli_kl,
    kl_controller,
    kl_estimate,
    penalize_rewards,
)
from skyasync.config.schema.algorithm import KLControlConfig
from skyasync.preflight.parts import check_parts
from tests.algorithms.batches import config
from tests.docs.pages import blocks


def policies() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy (with gradient), log-probabilities of a reference and of a third policy, over 5 tokens."""
    generator = torch.Generator().manual_seed(0)
    logits, reference, third = (
        torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    return logits.requires_grad_(), reference.log_softmax(0), third.log_softmax(0)


def exact(logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """KL(policy || reference) and its gradient."""
    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    return kl.detach(), torch.autograd.grad(kl, logits)[0]


@pytest.mark.parametrize("name", ["k1", "k3", "k1_straight_through", "k3_straight_through"])
def test_value_is_unbiased_on_policy(name: str) -> None:
    logits, reference, _ = policies()
    logprobs = logits.log_softmax(0).detach()
    mean = (logprobs.exp() * kl_estimate(logprobs, reference, name)).sum()
    torch.testing.assert_close(mean, exact(logits, reference)[0])


@pytest.mark.parametrize(("name", "unbiased"), [
    ("k2", True), ("k1_straight_through", True), ("k3_straight_through", True), ("k1", False), ("k3", False),
])  # fmt: skip
def test_as_a_loss_only_the_gradient_of_k2_is_that_of_the_divergence(
    name: str, unbiased: bool
) -> None:
    logits, reference, _ = policies()
    logprobs = logits.log_softmax(0)
    loss = (
        logprobs.exp().detach() * kl_estimate(logprobs, reference, name)
    ).sum()  # sampling has no gradient
    (slope,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(slope, exact(logits, reference)[1]) == unbiased


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_weighted_by_the_ratio_value_and_gradient_are_unbiased_off_policy(name: str) -> None:
    logits, reference, sampler = policies()
    logprobs = logits.log_softmax(0)
    ratio = (logprobs - sampler).exp()
    loss = (sampler.exp() * kl_estimate(logprobs, reference, name, weight=ratio)).sum()
    value, slope = exact(logits, reference)
    torch.testing.assert_close(loss.detach(), value)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], slope)


def test_the_bound_clamps_the_value_and_leaves_a_straight_through_gradient() -> None:
    far = torch.tensor([[-30.0, -1.0]], dtype=torch.float64, requires_grad=True)
    near = torch.tensor([[-1.0, -1.5]], dtype=torch.float64)
    assert kl_estimate(far, near, "k3", bound=10.0)[0, 0] == 10
    value = kl_estimate(far, near, "k3_straight_through", bound=10.0)
    assert value[0, 0] == 10
    assert torch.autograd.grad(value.sum(), far)[0].tolist() == [[-29.0, 0.5]]


def test_bernoulli_kl_is_the_divergence_of_two_coins() -> None:
    p, q = torch.tensor([0.3]).double(), torch.tensor([0.6]).double()
    expected = 0.3 * torch.log(torch.tensor(0.5).double()) + 0.7 * torch.log(
        torch.tensor(1.75).double()
    )
    torch.testing.assert_close(bernoulli_kl(p.log(), q.log()), expected.unsqueeze(0))


def test_rewards_lose_the_coefficient_times_the_kl_on_the_mask_only() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    policy, reference = torch.full((2, 3), -1.0), torch.full((2, 3), -1.5)
    rewards, mean = penalize_rewards(
        torch.ones(2, 3), policy, reference, mask, coef=0.1, estimator="k1"
    )
    torch.testing.assert_close(rewards, torch.tensor([[0.95, 0.95, 1.0], [0.95, 1.0, 1.0]]))
    torch.testing.assert_close(mean, torch.tensor(0.5))


def test_the_adaptive_controller_moves_towards_its_target_by_at_most_a_fifth() -> None:
    controller = kl_controller(
        config(kl_loss_coef=0.1, kl_ctrl=KLControlConfig("adaptive", kl_target=0.1, horizon=100))
    )
    assert isinstance(controller, AdaptiveKLController)
    controller.update(10.0, 100)
    assert controller.value == pytest.approx(0.12)
    controller.update(0.09, 50)
    assert controller.value == pytest.approx(0.12 * 0.95)


def test_the_controller_of_the_page_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = (block for block in blocks() if "class Halving(KLController)" in block.text)
    (tmp_path / "controllers.py").write_text(block.text)
    monkeypatch.chdir(tmp_path)
    reference = "trainer.algorithm.kl_ctrl.type=controllers.py:Halving"
    assert reference in block.text
    cfg = load_config(
        [reference, "trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.kl_loss_coef=0.4"]
    )
    check_parts(cfg, [])
    controller = kl_controller(cfg.trainer.algorithm)
    controller.update(0.5, 8)
    assert controller.value == 0.4
    controller.update(0.001, 8)
    assert controller.value == 0.2


def test_a_controller_is_found_by_its_registered_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubling(KLController):
        def update(self, kl: float, samples: int) -> None:
            self.value *= 2

    monkeypatch.setitem(KL_CONTROLLERS, "doubling", Doubling)
    controller = kl_controller(config(kl_loss_coef=0.1, kl_ctrl=KLControlConfig("doubling")))
    controller.update(0.0, 1)
    assert controller.value == 0.2


class NoUpdate(KLController):
    pass


class NoCoefficient(KLController):
    def __init__(self) -> None:
        super().__init__(0.1)


class OtherUpdate(KLController):
    def update(self, kl: float) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("controller", "problem"),
    [
        (int, "must be a subclass of skyasync.algorithms.kl.KLController"),
        (NoUpdate, "has no method update"),
        (NoCoefficient, r"must be made with a coefficient: def __init__\(self, value\)"),
        (OtherUpdate, r"update\(self, kl.*\).* must take \(self, kl, samples\)"),
    ],
)
def test_a_wrong_controller_is_an_error_of_the_start_check(
    controller: type, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KL_CONTROLLERS, "wrong", controller)
    cfg = load_config(["trainer.algorithm.use_kl_in_reward=true"])
    cfg.trainer.algorithm.kl_ctrl.type = "wrong"
    with pytest.raises(UserError, match=f"KL controller 'wrong'.*{problem}"):
        check_parts(cfg, [])


def test_an_unknown_controller_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="adaptive"):
        load_config(
            ["trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.kl_ctrl.type=adaptve"]
        )


def test_the_fixed_controller_never_moves() -> None:
    controller = kl_controller(config(kl_loss_coef=0.1))
    controller.update(10.0, 100)
    assert controller == FixedKLController(0.1)
