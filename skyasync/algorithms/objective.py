"""The objective: policy loss, correction, KL and entropy terms as one loss per token.

Invariant: ``needs`` lists exactly the log-probabilities that enter (behaviour, proximal,
reference), read off the signatures of the chosen functions. Everything that compares tokens with
the whole mini-batch is made before it is split (``prepare``, ``loss_weights``), so the gradient
does not depend on micro-batches or ranks.

    prepared = objective.prepare(batch)                          whole mini-batch, only where the loss asks for it
    weights = loss_weights(cfg, mask, group_ids)                 whole mini-batch
    token_loss, statistics = objective.token_loss(...)           each micro-batch
    loss = (weights * token_loss).sum()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, CORRECTIONS, LOSS_REDUCTIONS, POLICY_LOSSES
from skyasync.algorithms.binding import Bound, bind, refuse_unused_extra, setting
from skyasync.algorithms.kl import kl_estimate
from skyasync.algorithms.masked import log_ratio
from skyasync.algorithms.reductions import loss_weights
from skyasync.errors import UserError
from skyasync.registry import declared

__all__ = ["Objective", "loss_weights"]

POLICIES = frozenset({"proximal", "behaviour", "reference"})
_PER_TOKEN = frozenset({"proximal", "behaviour", "advantages"})


class Rows(Protocol):
    """A batch whose log-probabilities and advantages are known; ``[batch, length]`` each."""

    @property
    def proximal_logprobs(self) -> Tensor | None: ...
    @property
    def behaviour_logprobs(self) -> Tensor: ...
    @property
    def advantages(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...


class Objective:
    """What ``trainer.algorithm`` asks for, with every name resolved and checked once.

    Attributes:
        needs: the log-probabilities that enter, of "proximal", "behaviour", "reference"; and
            "entropy" if that does.
        needs_before_update: those of them that ``prepare`` or the reward must have for the whole
            mini-batch; a worker may put ``current.detach()`` for any other missing proximal
            log-probabilities, which is exact in the first optimizer step after a batch's start.
        corrected: behaviour log-probabilities enter at all. Asynchronous plans refuse objectives
            without.
        prepares: ``token_loss`` needs what ``prepare`` returns.
        trains_entropy: the entropy has a gradient; else it is a statistic, if it is needed at all.

    Raises:
        UserError: for unknown names, unused ``extra`` settings, and a weight on top of a loss that
            is already weighted by the behaviour policy.
    """

    def __init__(self, cfg: object) -> None:
        self.anchor = setting(cfg, "ratio_anchor", "proximal")
        self._name = name = setting(cfg, "policy_loss_type", "ppo")
        loss = POLICY_LOSSES[name]
        select = declared(loss, "select")
        self._loss = bind(loss, cfg)
        self._selectors = [bind(select, cfg)] if select else []
        self._corrections = self._bind_corrections(cfg, name)
        self._kl_estimator = setting(cfg, "kl_estimator_type", "k3")
        self._kl_bound = setting(cfg, "kl_clamp", 0.0)
        self._kl_weighted = setting(cfg, "kl_importance_weighted", False)
        if setting(cfg, "use_kl_loss", False):
            self._kl_coef = setting(cfg, "kl_loss_coef", 0.001)
        else:
            self._kl_coef = 0.0
        self._entropy = setting(cfg, "use_entropy_loss", False)
        if self._entropy:
            self._entropy_coef = setting(cfg, "entropy_loss_coef", 0.01)
        else:
            self._entropy_coef = 0.0
        self.prepares = bool(self._selectors)
        losses = POLICY_LOSSES.about(name)
        self.trains_entropy = bool(self._entropy_coef) or any(
            "entropy" in about.inputs for about in losses
        )
        kl_in_reward = setting(cfg, "use_kl_in_reward", False)
        self.needs_before_update = self._policies(*self._selectors)
        if kl_in_reward:
            self.needs_before_update |= {"proximal", "reference"}
        self._enters = self._policies(self._loss, *self._corrections)
        if self._kl_coef:
            self._enters |= {"reference", self.anchor} if self._kl_weighted else {"reference"}
        if self._entropy:
            self._enters |= {"entropy"}
        self.needs = self._enters | self.needs_before_update
        self.corrected = "behaviour" in self.needs
        if (
            "proximal" in self.needs
            and setting(cfg, "proximal_logprobs", "recompute") != "recompute"
        ):
            self.needs |= {"behaviour"}  # one end of the interpolation
        functions = [b.function for b in (self._loss, *self._corrections, *self._selectors)]
        functions += [ADVANTAGE_ESTIMATORS[setting(cfg, "advantage_estimator", "grpo")]]
        functions += [LOSS_REDUCTIONS[setting(cfg, "loss_reduction", "token_mean")]]
        refuse_unused_extra(cfg, *functions)

    def token_loss(
        self,
        *,
        current: Tensor,
        proximal: Tensor | None = None,
        behaviour: Tensor | None = None,
        reference: Tensor | None = None,
        advantages: Tensor,
        mask: Tensor,
        entropy: Tensor | None = None,
        selection: Tensor | None = None,
        correction_exponent: float = 1.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of each token, 0 outside the mask, and its statistics (float or bool); all
        ``[batch, length]``.

        A missing ``proximal`` is ``current.detach()``. What stands outside the mask has no
        influence.

        Args:
            current: log-probabilities with gradient.
            selection: what ``prepare`` returned under that name.
            correction_exponent: of the correction's factors; see ``smoothing_exponent``.

        Raises:
            ValueError: if a tensor that the objective needs is missing.
            UserError: if the loss returns something else than one value per token.
        """
        given = {
            "current": torch.where(mask, current, 0),
            "proximal": current.detach() if proximal is None else proximal,
            "behaviour": behaviour,
            "reference": reference,
            "advantages": advantages,
            "entropy": entropy,
            "mask": mask,
            "selection": selection,
        }
        tensors = {name: t for name, t in given.items() if t is not None}
        self._check(tensors)
        if (
            "mask" in self._loss.inputs
        ):  # tokens of a row meet each other: those outside the mask must be harmless
            tensors |= {
                name: torch.where(mask, t, 0) for name, t in tensors.items() if name in _PER_TOKEN
            }
        tensors["anchor"] = tensors.get(self.anchor, tensors["proximal"])
        outcome = self._loss(tensors)
        loss, statistics = outcome if isinstance(outcome, tuple) else (outcome, {})
        self._check_per_token(loss, mask)
        loss, statistics = self._correct(loss, statistics, tensors, correction_exponent)
        loss = self._regularize(loss, statistics, tensors)
        with torch.no_grad():
            statistics["approx_kl"] = tensors["anchor"] - tensors["current"]
            if "ratio" not in statistics:
                statistics["ratio"] = log_ratio(tensors["current"], tensors["anchor"]).exp()
        return torch.where(mask, loss, 0), {
            name: value.detach() for name, value in statistics.items()
        }

    def prepare(self, batch: Rows) -> dict[str, Tensor]:
        """Further arguments of ``token_loss``, computed on a whole mini-batch; empty for most
        objectives.

        Args:
            batch: a ``TrainingBatch`` with ``loss_mask``, ``advantages`` and the log-probabilities
                in ``needs_before_update``.

        Returns:
            ``{"selection": [batch, length]}`` for clip_cov, kl_cov and m2po, else ``{}``.
        """
        if not self._selectors:
            return {}
        return {"selection": self._selectors[0](_tensors_of(batch))}

    def correction_weights(self, batch: Rows) -> Tensor | None:
        """The factor of the policy loss on a batch with all its log-probabilities,
        ``[batch, length]``; None without.

        For ``off_policy_metrics(..., weights=...)``. The batch as in ``prepare``.
        """
        if not self._corrections:
            return None
        return self._weight(_tensors_of(batch)).expand_as(batch.loss_mask)

    def _bind_corrections(self, cfg: object, loss: str) -> list[Bound[Tensor]]:
        """The correction and the masks, without those that do nothing."""
        name = setting(cfg, "off_policy_correction", "auto")
        weighted = "behaviour" in self._policies(self._loss)
        if name == "auto":
            if "behaviour" in self._policies(self._loss, *self._selectors):
                name = "none"
            else:
                name = "token_tis"
        elif weighted and name != "none" and not name.endswith("_mask"):
            raise UserError(
                f"policy loss {loss!r} with ratio_anchor={self.anchor} already weighs samples by the "
                f"behaviour policy; off_policy_correction={name!r} would weigh them twice: choose auto, none or a mask"
            )
        names = [name, *setting(cfg, "off_policy_masks", [])]
        return [bind(CORRECTIONS[name], cfg) for name in names if name != "none"]

    def _policies(self, *functions: Bound[Any]) -> frozenset[str]:
        inputs = {name for function in functions for name in function.inputs}
        return frozenset(self.anchor if name == "anchor" else name for name in inputs) & POLICIES

    def _correct(
        self,
        loss: Tensor,
        statistics: dict[str, Tensor],
        tensors: Mapping[str, Any],
        exponent: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not self._corrections:
            return loss, statistics
        weight = self._weight(tensors)
        if exponent != 1.0:
            weight = weight.pow(exponent)
        maps = {
            "correction_weight": weight.expand_as(loss),
            "correction_masked": (weight == 0).expand_as(loss),
        }
        return loss * weight, {**statistics, **maps}

    def _weight(self, tensors: Mapping[str, Any]) -> Tensor:
        weight = self._corrections[0](tensors)
        for correction in self._corrections[1:]:
            weight = weight * correction(tensors)
        return weight

    def _regularize(
        self, loss: Tensor, statistics: dict[str, Tensor], tensors: Mapping[str, Any]
    ) -> Tensor:
        if self._kl_coef:
            if self._kl_weighted:
                ratio = log_ratio(tensors["current"], tensors["anchor"]).exp()
            else:
                ratio = None
            kl = kl_estimate(
                tensors["current"],
                tensors["reference"],
                self._kl_estimator,
                bound=self._kl_bound,
                weight=ratio,
            )
            loss = loss + self._kl_coef * kl
            statistics["kl_loss"] = kl
        if self._entropy_coef:
            loss = loss - self._entropy_coef * tensors["entropy"]
        if self._entropy:
            statistics["entropy"] = tensors["entropy"]
        return loss

    def _check(self, tensors: Mapping[str, Any]) -> None:
        needed = self._enters | ({"selection"} if self.prepares else set())
        missing = sorted(name for name in needed if name not in tensors)
        if missing:
            raise ValueError(
                f"the objective needs {', '.join(missing)} (objective.needs = {sorted(self.needs)})"
            )

    def _check_per_token(self, loss: object, mask: Tensor) -> None:
        """A mean would be scaled by the weights of the reduction, without an error."""
        if isinstance(loss, Tensor) and loss.shape == mask.shape:
            return
        if isinstance(loss, Tensor):
            result = f"a tensor of shape {tuple(loss.shape)}"
        else:
            result = type(loss).__name__
        raise UserError(
            f"policy loss {self._name!r} must return one value per token, a tensor of shape {tuple(mask.shape)}; it "
            f"returned {result} (trainer.algorithm.loss_reduction averages)"
        )


def _tensors_of(batch: Rows) -> dict[str, Any]:
    return {
        "proximal": batch.proximal_logprobs,
        "behaviour": batch.behaviour_logprobs,
        "advantages": batch.advantages,
        "mask": batch.loss_mask,
    }
