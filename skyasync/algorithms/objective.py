"""The objective: policy loss, correction, KL and entropy terms as one loss per token.

Invariant: ``needs`` lists exactly the log-probabilities that enter (behaviour, proximal,
reference), read off the signatures of the chosen functions. Everything that compares tokens with
the whole mini-batch is made before it is split (``prepare``, ``loss_weights``), so the gradient
does not depend on micro-batches or ranks.

    prepared = objective.prepare(batch)                   whole mini-batch, only where the loss needs it
    weights = loss_weights(cfg, mask, group_ids)          whole mini-batch
    token_loss, statistics = objective.token_loss(...)    each micro-batch
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
# Tensors of a batch that may hold anything outside the mask; current is masked in any case.
_PER_TOKEN = frozenset({"proximal", "behaviour", "advantages"})


class Rows(Protocol):
    """A batch with log-probabilities and advantages; ``[batch, length]`` each."""

    @property
    def proximal_logprobs(self) -> Tensor | None: ...
    @property
    def behaviour_logprobs(self) -> Tensor: ...
    @property
    def advantages(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...


class Objective:
    """The objective of ``trainer.algorithm``, with every name resolved and checked once.

    Attributes:
        needs: the log-probabilities that enter, of "proximal", "behaviour", "reference"; and
            "entropy" if that does.
        needs_before_update: those of them that ``prepare`` or the reward must have for the whole
            mini-batch; a worker may put ``current.detach()`` for any other missing proximal
            log-probabilities, which is exact in the first optimizer step after a batch's start.
        corrected: behaviour log-probabilities enter at all. Asynchronous plans reject objectives
            without.
        prepares: ``token_loss`` needs what ``prepare`` returns.
        trains_entropy: the entropy has a gradient; else it is a statistic, if it is needed at all.

    Raises:
        UserError: for unknown names, unused ``extra`` settings, and a weight on top of a loss that
            is already weighted by the behaviour policy.
    """

    def __init__(self, cfg: object) -> None:
        self.anchor = setting(cfg, "ratio_anchor", "proximal")
        self._name = setting(cfg, "policy_loss_type", "ppo")
        loss = POLICY_LOSSES[self._name]
        select = declared(loss, "select")
        self._loss = bind(loss, cfg)
        self._selectors = [bind(select, cfg)] if select else []
        self._corrections = self._bind_corrections(cfg, self._name)
        self._kl_estimator = setting(cfg, "kl_estimator_type", "k3")
        self._kl_bound = setting(cfg, "kl_clamp", 0.0)
        self._kl_weighted = setting(cfg, "kl_importance_weighted", False)
        self._kl_coef = 0.0
        if setting(cfg, "use_kl_loss", False):
            self._kl_coef = setting(cfg, "kl_loss_coef", 0.001)
        self._entropy = setting(cfg, "use_entropy_loss", False)
        self._entropy_coef = 0.0
        if self._entropy:
            self._entropy_coef = setting(cfg, "entropy_loss_coef", 0.01)
        self.prepares = bool(self._selectors)
        declarations = POLICY_LOSSES.about(self._name)
        loss_has_entropy = any("entropy" in declaration.inputs for declaration in declarations)
        self.trains_entropy = bool(self._entropy_coef) or loss_has_entropy
        # A penalty in the reward is part of the advantages: it needs the whole batch.
        self.needs_before_update = self._policies(*self._selectors)
        if setting(cfg, "use_kl_in_reward", False):
            self.needs_before_update |= {"proximal", "reference"}
        self._inputs = self._policies(self._loss, *self._corrections)
        if self._kl_coef:
            self._inputs |= {"reference"}
            if self._kl_weighted:
                self._inputs |= {self.anchor}
        if self._entropy:
            self._inputs |= {"entropy"}
        self.needs = self._inputs | self.needs_before_update
        self.corrected = "behaviour" in self.needs
        # After ``corrected``: an interpolated proximal policy corrects nothing.
        recomputes = setting(cfg, "proximal_logprobs", "recompute") == "recompute"
        if "proximal" in self.needs and not recomputes:
            self.needs |= {"behaviour"}  # one end of the interpolation
        functions = [b.function for b in (self._loss, *self._corrections, *self._selectors)]
        functions.append(ADVANTAGE_ESTIMATORS[setting(cfg, "advantage_estimator", "grpo")])
        functions.append(LOSS_REDUCTIONS[setting(cfg, "loss_reduction", "token_mean")])
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
        """The loss of each token, 0 outside the mask, and its statistics (float or bool).

        All tensors are ``[batch, length]``. A missing ``proximal`` is ``current.detach()``. What
        stands outside the mask has no influence.

        Args:
            current: log-probabilities with gradient.
            selection: as ``prepare`` returned it.
            correction_exponent: of the correction's factors; see ``smoothing_exponent``.

        Raises:
            ValueError: if a tensor that the objective needs is missing.
            UserError: if the loss returns something else than one value per token.
        """
        inputs = {
            "current": torch.where(mask, current, 0),
            "proximal": current.detach() if proximal is None else proximal,
            "behaviour": behaviour,
            "reference": reference,
            "advantages": advantages,
            "entropy": entropy,
            "mask": mask,
            "selection": selection,
        }
        tensors = {name: tensor for name, tensor in inputs.items() if tensor is not None}
        self._check(tensors)
        if "mask" in self._loss.inputs:
            # Tokens of a row meet each other: those outside the mask must be harmless.
            for name in _PER_TOKEN & tensors.keys():
                tensors[name] = torch.where(mask, tensors[name], 0)
        tensors["anchor"] = tensors.get(self.anchor, tensors["proximal"])
        outcome = self._loss(tensors)
        statistics: dict[str, Tensor] = {}
        if isinstance(outcome, tuple):
            loss, loss_statistics = outcome
            statistics.update(loss_statistics)
        else:
            loss = outcome
        self._check_per_token(loss, mask)
        loss, statistics = self._correct(loss, statistics, tensors, correction_exponent)
        loss = self._regularize(loss, statistics, tensors)
        with torch.no_grad():
            statistics["approx_kl"] = tensors["anchor"] - tensors["current"]
            if "ratio" not in statistics:
                statistics["ratio"] = log_ratio(tensors["current"], tensors["anchor"]).exp()
        for name, value in statistics.items():
            statistics[name] = value.detach()  # metrics must not hold the graph
        return torch.where(mask, loss, 0), statistics

    def prepare(self, batch: Rows) -> dict[str, Tensor]:
        """Further arguments of ``token_loss``, computed on a whole mini-batch.

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
        """The factor of the policy loss, ``[batch, length]``; None without corrections.

        For ``off_policy_metrics(..., weights=...)``.

        Args:
            batch: as in ``prepare``, with all its log-probabilities.
        """
        if not self._corrections:
            return None
        return self._weight(_tensors_of(batch)).expand_as(batch.loss_mask)

    def _bind_corrections(self, cfg: object, loss: str) -> list[Bound[Tensor]]:
        """The correction and the masks, without those that do nothing."""
        name = setting(cfg, "off_policy_correction", "auto")
        is_weighted = "behaviour" in self._policies(self._loss)
        if name == "auto":
            # A loss, or a choice of its tokens, that uses the behaviour policy corrects by itself.
            uses_behaviour = "behaviour" in self._policies(self._loss, *self._selectors)
            name = "none" if uses_behaviour else "token_tis"
        elif is_weighted and name != "none" and not name.endswith("_mask"):
            raise UserError(
                f"policy loss {loss!r} with ratio_anchor={self.anchor} already weighs samples by the "
                f"behaviour policy; off_policy_correction={name!r} would weigh them twice: choose auto, none or a mask"
            )
        names = [name, *setting(cfg, "off_policy_masks", [])]
        return [bind(CORRECTIONS[name], cfg) for name in names if name != "none"]

    def _policies(self, *functions: Bound[Any]) -> frozenset[str]:
        """The log-probabilities that the functions take, besides the current policy's."""
        inputs: set[str] = set()
        for function in functions:
            inputs.update(function.inputs)
        if "anchor" in inputs:
            inputs.add(self.anchor)
        return POLICIES & inputs

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
        # A weight per sequence is [batch, 1]; statistics are per token.
        statistics["correction_weight"] = weight.expand_as(loss)
        statistics["correction_masked"] = (weight == 0).expand_as(loss)
        return loss * weight, statistics

    def _weight(self, tensors: Mapping[str, Any]) -> Tensor:
        weight = self._corrections[0](tensors)
        for correction in self._corrections[1:]:
            weight = weight * correction(tensors)
        return weight

    def _regularize(
        self,
        loss: Tensor,
        statistics: dict[str, Tensor],
        tensors: Mapping[str, Any],
    ) -> Tensor:
        if self._kl_coef:
            ratio = None
            if self._kl_weighted:
                ratio = log_ratio(tensors["current"], tensors["anchor"]).exp()
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
        """Raise ``ValueError`` if a tensor is missing."""
        needed_names = set(self._inputs)
        if self.prepares:
            needed_names.add("selection")
        missing_names = ", ".join(sorted(needed_names - tensors.keys()))
        if missing_names:
            raise ValueError(
                f"the objective needs {missing_names} (objective.needs = {sorted(self.needs)})"
            )

    def _check_per_token(self, loss: object, mask: Tensor) -> None:
        """Raise ``UserError`` if the loss is not one value per token.

        A mean would be scaled by the weights of the reduction, without an error.
        """
        result = type(loss).__name__
        if isinstance(loss, Tensor):
            if loss.shape == mask.shape:
                return
            result = f"a tensor of shape {tuple(loss.shape)}"
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
