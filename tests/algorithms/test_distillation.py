"""A teacher's addition to advantages is the policy gradient of the reverse KL, over all tokens."""

from __future__ import annotations

import torch

from skyasync.algorithms.kl import teacher_advantages, top_k_reverse_kl


def test_in_expectation_the_gradient_is_that_of_the_reverse_kl() -> None:
    """Each of the 7 tokens once, weighted by its probability: the expectation itself, without sampling."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    policy, teacher = logits.log_softmax(0), torch.randn(7, dtype=torch.float64).log_softmax(0)
    (expected,) = torch.autograd.grad(
        (policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True
    )
    advantages, _ = teacher_advantages(
        policy[:, None], teacher[:, None], torch.ones(7, 1, dtype=torch.bool)
    )
    assert not advantages.requires_grad
    (found,) = torch.autograd.grad(
        -(policy.detach().exp() * advantages[:, 0] * policy).sum(), logits
    )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_what_is_outside_the_mask_has_no_influence() -> None:
    logprobs, teacher = (
        torch.tensor([[torch.nan, -1.0, -3.0]]),
        torch.tensor([[0.0, -0.5, torch.inf]]),
    )
    advantages, kl = teacher_advantages(logprobs, teacher, torch.tensor([[False, True, False]]))
    assert advantages.tolist() == [[0.0, 0.5, 0.0]] and float(kl) == -0.5
    nothing, kl = teacher_advantages(logprobs, teacher, torch.zeros(1, 3, dtype=torch.bool))
    assert not nothing.any() and float(kl) == 0.0


def test_over_all_tokens_it_is_the_reverse_kl_and_over_fewer_that_of_them_and_the_rest() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    policy, teacher = logits.log_softmax(-1), torch.randn(5, 7, dtype=torch.float64).log_softmax(-1)
    whole = (policy.exp() * (policy - teacher)).sum(-1)
    torch.testing.assert_close(top_k_reverse_kl(policy, teacher), whole, atol=1e-12, rtol=0)
    top = teacher.topk(3).indices
    likely, rest = teacher.gather(-1, top), teacher.exp().scatter(-1, top, 0.0).sum(-1)
    mine, mine_rest = policy.gather(-1, top), policy.exp().scatter(-1, top, 0.0).sum(-1)
    expected = (mine.exp() * (mine - likely)).sum(-1) + mine_rest * (mine_rest / rest).log()
    found = top_k_reverse_kl(mine, likely)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert (found > 0).all() and (found <= whole).all()
    for gradients in zip(torch.autograd.grad(found.sum(), logits, retain_graph=True),
                         torch.autograd.grad(expected.sum(), logits), strict=True):  # fmt: skip
        torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)


def test_a_rest_that_rounding_has_eaten_is_finite() -> None:
    sure = torch.tensor([0.0, -30.0], requires_grad=True)
    kl = top_k_reverse_kl(sure, torch.tensor([-0.5, -5.0]))
    kl.backward()
    assert kl.isfinite() and sure.grad is not None and sure.grad.isfinite().all()
