"""The objective: the policies it needs, the settings it rejects, and its sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from skyasync.algorithms import POLICY_LOSSES
from skyasync.algorithms.kl import kl_estimate
from skyasync.algorithms.objective import Objective
from skyasync.errors import UserError
from tests.algorithms.batches import (
    config,
    gradient,
    objective_or_none,
    prepared,
    random_batch,
    token_loss,
)


@pytest.mark.parametrize(("changes", "needs"), [
    ({}, {"proximal", "behaviour"}),
    ({"off_policy_correction": "none"}, {"proximal"}),
    ({"policy_loss_type": "vanilla", "off_policy_correction": "none"}, set()),
    ({"policy_loss_type": "rollout_is"}, {"behaviour"}),
    ({"policy_loss_type": "dppo"}, {"behaviour"}),
    ({"ratio_anchor": "behaviour"}, {"behaviour"}),
    ({"policy_loss_type": "decoupled_ppo"}, {"proximal", "behaviour"}),
    ({"policy_loss_type": "m2po"}, {"proximal", "behaviour"}),
    ({"policy_loss_type": "rollout_is", "use_kl_loss": True}, {"behaviour", "reference"}),
    ({"policy_loss_type": "rollout_is", "use_kl_in_reward": True}, {"behaviour", "proximal", "reference"}),
    ({"policy_loss_type": "rollout_is", "use_entropy_loss": True}, {"behaviour", "entropy"}),
])  # fmt: skip
def test_needs_are_exactly_the_policies_that_enter(changes: dict, needs: set[str]) -> None:
    objective = Objective(config(**changes))
    assert objective.needs == needs
    assert objective.corrected == ("behaviour" in needs)


@pytest.mark.parametrize(("loss", "needs"), [
    ("ppo", set()), ("clip_cov", {"proximal"}), ("kl_cov", {"proximal"}), ("m2po", {"proximal", "behaviour"}),
])  # fmt: skip
def test_losses_that_choose_tokens_need_their_policies_before_the_update(
    loss: str, needs: set[str]
) -> None:
    objective = Objective(config(policy_loss_type=loss))
    assert objective.needs_before_update == needs
    assert objective.prepares == bool(needs)


def test_a_policy_that_does_not_enter_may_be_missing() -> None:
    cfg, batch = config(policy_loss_type="rollout_is"), random_batch()
    loss, _ = Objective(cfg).token_loss(
        current=batch.current,
        behaviour=batch.behaviour_logprobs,
        advantages=batch.advantages,
        mask=batch.loss_mask,
    )
    torch.testing.assert_close(loss, token_loss(cfg, batch)[0])


def test_a_missing_proximal_policy_is_the_current_one() -> None:
    cfg, batch = config(), random_batch()
    same = replace(batch, proximal_logprobs=batch.current)
    missing = replace(batch, proximal_logprobs=None)
    torch.testing.assert_close(
        gradient(cfg, prepared(cfg, missing)), gradient(cfg, prepared(cfg, same))
    )


def test_a_missing_policy_that_enters_is_an_error_that_names_it() -> None:
    batch = random_batch()
    with pytest.raises(ValueError, match="needs behaviour"):
        Objective(config()).token_loss(
            current=batch.current, advantages=batch.advantages, mask=batch.loss_mask
        )


def test_a_choice_among_all_tokens_is_never_made_on_a_micro_batch() -> None:
    with pytest.raises(ValueError, match="selection"):
        token_loss(config(policy_loss_type="clip_cov"), random_batch())


@pytest.mark.parametrize("changes", [
    {"policy_loss_type": "decoupled_ppo", "off_policy_correction": "token_tis"},
    {"policy_loss_type": "ppo", "ratio_anchor": "behaviour", "off_policy_correction": "icepop"},
])  # fmt: skip
def test_weighing_by_the_behaviour_policy_twice_is_refused(changes: dict) -> None:
    with pytest.raises(UserError, match="twice"):
        Objective(config(**changes))
    assert objective_or_none(config(**changes | {"off_policy_correction": "geometric_mask"}))


@pytest.mark.parametrize("loss", ["decoupled_ppo", "rollout_is", "dppo", "m2po"])
def test_auto_adds_no_weight_to_a_loss_that_corrects_itself(loss: str) -> None:
    batch = random_batch()
    automatic, none = (
        config(policy_loss_type=loss, off_policy_correction=name) for name in ("auto", "none")
    )
    torch.testing.assert_close(
        token_loss(automatic, prepared(automatic, batch))[0],
        token_loss(none, prepared(none, batch))[0],
    )


def test_auto_is_truncated_importance_sampling_for_the_others() -> None:
    batch = random_batch()
    loss, statistics = token_loss(config(), batch)
    plain, _ = token_loss(config(off_policy_correction="none"), batch)
    weight = (batch.proximal_logprobs - batch.behaviour_logprobs).exp().clamp(max=2.0)
    torch.testing.assert_close(loss, plain * weight)
    torch.testing.assert_close(
        statistics["correction_weight"][batch.loss_mask], weight[batch.loss_mask]
    )


def test_the_correction_of_a_whole_batch_is_that_of_its_loss() -> None:
    batch = random_batch()
    cfg = config(off_policy_correction="icepop", icepop_high=1.2, off_policy_masks=["outlier_mask"])
    weight = Objective(cfg).correction_weights(batch)
    _, statistics = token_loss(cfg, batch)
    torch.testing.assert_close(
        statistics["correction_weight"][batch.loss_mask], weight[batch.loss_mask]
    )
    assert torch.equal(statistics["correction_masked"], statistics["correction_weight"] == 0)
    assert statistics["correction_masked"].any()
    assert Objective(config(off_policy_correction="none")).correction_weights(batch) is None


def test_an_exponent_smooths_the_factors_of_the_correction_and_leaves_those_of_a_mask() -> None:
    batch, cfg = random_batch(), config(off_policy_correction="icepop", icepop_high=1.2)
    weight = Objective(cfg).correction_weights(batch)
    assert weight is not None and (weight == 0).any()
    plain, _ = token_loss(config(off_policy_correction="none"), batch)
    given = {
        "current": batch.current,
        "proximal": batch.proximal_logprobs,
        "behaviour": batch.behaviour_logprobs,
    }
    given |= {"advantages": batch.advantages, "mask": batch.loss_mask}
    loss, statistics = Objective(cfg).token_loss(**given, correction_exponent=0.5)
    torch.testing.assert_close(loss, plain * weight.sqrt())
    assert torch.equal(
        statistics["correction_masked"][batch.loss_mask], (weight == 0)[batch.loss_mask]
    )


def test_masks_multiply_onto_the_correction() -> None:
    batch = random_batch()
    masked, _ = token_loss(config(off_policy_masks=["token_mask"]), batch)
    plain, _ = token_loss(config(), batch)
    ratio = (batch.proximal_logprobs - batch.behaviour_logprobs).exp()
    torch.testing.assert_close(masked, plain * ((ratio >= 0.5) & (ratio <= 2.0)))


def test_decoupled_ppo_is_ppo_with_icepop_from_zero() -> None:
    batch = random_batch()
    decoupled = config(policy_loss_type="decoupled_ppo", behave_imp_weight_cap=1.2)
    icepop = config(off_policy_correction="icepop", icepop_low=0.0, icepop_high=1.2)
    torch.testing.assert_close(token_loss(decoupled, batch)[0], token_loss(icepop, batch)[0])


def test_kl_and_entropy_are_added_outside_the_correction() -> None:
    batch = random_batch()
    full = config(use_kl_loss=True, kl_loss_coef=0.3, use_entropy_loss=True, entropy_loss_coef=0.2)
    extra = 0.3 * kl_estimate(batch.current, batch.reference_logprobs, "k3") - 0.2 * batch.entropy
    expected = token_loss(config(), batch)[0] + torch.where(batch.loss_mask, extra, 0)
    loss, statistics = token_loss(full, batch)
    torch.testing.assert_close(loss, expected)
    assert {"kl_loss", "entropy"} <= statistics.keys()


@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
def test_statistics_are_maps_without_gradient(loss: str) -> None:
    cfg = config(policy_loss_type=loss)
    batch = prepared(cfg, random_batch())
    _, statistics = token_loss(cfg, batch, batch.current.clone().requires_grad_())
    assert {"ratio", "approx_kl"} <= statistics.keys()
    assert all(s.shape == batch.current.shape and not s.requires_grad for s in statistics.values())


def test_extra_sets_a_parameter_by_name_and_an_unused_one_is_refused() -> None:
    batch = random_batch()
    cfg = config(policy_loss_type="gspo", extra={"token_gradient": True})
    torch.testing.assert_close(
        token_loss(cfg, batch)[0], token_loss(config(policy_loss_type="gspo"), batch)[0]
    )
    assert not torch.allclose(
        gradient(cfg, prepared(cfg, batch)),
        gradient(config(policy_loss_type="gspo"), prepared(cfg, batch)),
    )
    with pytest.raises(UserError, match="token_gradient"):
        Objective(config(policy_loss_type="gspo", extra={"tokn_gradient": True}))


def test_a_users_loss_is_a_plain_function_and_its_signature_its_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(current, behaviour, advantages, *, sharpness: float = 1.0):  # type: ignore[no-untyped-def]
        return -sharpness * (current - behaviour) * advantages

    monkeypatch.setitem(POLICY_LOSSES, "mine", mine)
    cfg, batch = config(policy_loss_type="mine", extra={"sharpness": 2.0}), random_batch()
    assert Objective(cfg).needs == {"behaviour"}
    expected = (
        -2.0 * (batch.current - batch.behaviour_logprobs) * batch.advantages * batch.loss_mask
    )
    torch.testing.assert_close(token_loss(cfg, batch)[0], expected)


def test_m2po_drops_the_fewest_tokens_that_bring_the_second_moment_below_the_threshold() -> None:
    cfg = config(policy_loss_type="m2po", m2po_threshold=0.02)
    batch = prepared(cfg, random_batch(rows=12, group_size=4))
    moment = (batch.proximal_logprobs - batch.behaviour_logprobs).square()
    kept, dropped = batch.loss_mask & batch.selection, batch.loss_mask & ~batch.selection
    assert moment[kept].mean() < 0.02
    assert moment[kept].max() < moment[dropped].min()
    assert torch.cat([moment[kept], moment[dropped].min().unsqueeze(0)]).mean() >= 0.02


def test_clip_cov_draws_the_given_share_among_the_middle_covariances() -> None:
    cfg = config(policy_loss_type="clip_cov")
    cfg.clip_cov.clip_ratio, cfg.clip_cov.clip_cov_lb = 0.1, 0.0
    batch = prepared(cfg, random_batch(rows=12, group_size=4))
    assert batch.selection.sum() == int(0.1 * batch.loss_mask.sum())
    assert not (batch.selection & ~batch.loss_mask).any()


def test_an_entropy_of_coefficient_0_is_a_statistic_and_no_part_of_the_loss() -> None:
    batch = random_batch()
    found = [
        Objective(config(**more)).token_loss(
            current=batch.current, advantages=batch.advantages, mask=batch.loss_mask, entropy=batch.entropy,
            behaviour=batch.behaviour_logprobs, proximal=batch.proximal_logprobs,
        )
        for more in ({}, {"use_entropy_loss": True, "entropy_loss_coef": 0.0})
    ]  # fmt: skip
    assert torch.equal(found[0][0], found[1][0])
    assert "entropy" not in found[0][1] and torch.equal(
        found[1][1]["entropy"], batch.entropy.detach()
    )
    objectives = [
        Objective(config(use_entropy_loss=True, entropy_loss_coef=coef)) for coef in (0.0, 0.1)
    ]
    assert [o.trains_entropy for o in objectives] == [False, True] and all(
        "entropy" in o.needs for o in objectives
    )


@pytest.mark.parametrize(("returned", "found"), [
    (lambda loss: loss.mean(), r"a tensor of shape \(\)"),
    (lambda loss: (loss.sum(1), {}), r"a tensor of shape \(6,\)"),
    (lambda loss: None, "NoneType"),
])  # fmt: skip
def test_a_loss_that_is_not_per_token_is_an_error_that_names_it(
    returned: Callable[[Tensor], object], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        POLICY_LOSSES, "mine", lambda current, advantages: returned(-current * advantages)
    )
    batch = random_batch()
    with pytest.raises(
        UserError, match=rf"policy loss 'mine' must return one value per token.*it returned {found}"
    ):
        token_loss(config(policy_loss_type="mine"), batch)
