"""SkyRL's registries of losses and advantage estimators, whose functions have other parameters and return a sum.

A loss of theirs gives one number for a batch. Its derivative by each log-probability is what each token is trained
with, weighed by ``trainer.algorithm.loss_reduction`` as every loss is here. That is SkyRL's own rule, which weighs the
advantages instead, wherever a loss is proportional to them.

Invariant: a loss that never reads ``rollout_logprobs`` does not count as one that corrects for stale samples.
Sources: ``skyrl/backends/skyrl_train/utils/ppo_utils.py`` and SkyRL's page on custom algorithms.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from enum import Enum
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyasync.algorithms.binding import configured
from skyasync.errors import UserError
from skyasync.registry import Registry

F = TypeVar("F", bound=Callable[..., object])
Made = Callable[..., object]
_ROLLOUT = ("rollout_logprobs", "rollout_log_probs")
_LOSS = ("log_probs", "old_log_probs", "advantages", "config", "loss_mask", *_ROLLOUT)


def register_policy_loss(name: str | Enum) -> Callable[[F], F]:
    """``trainer.algorithm.policy_loss_type=name`` means the decorated function."""

    def add(function: F) -> F:
        PolicyLossRegistry.register(name, function)
        return function

    return add


def register_advantage_estimator(name: str | Enum) -> Callable[[F], F]:
    """``trainer.algorithm.advantage_estimator=name`` means the decorated function."""

    def add(function: F) -> F:
        AdvantageEstimatorRegistry.register(name, function)
        return function

    return add


class _Names:
    """A registry by SkyRL's methods."""

    _parts: ClassVar[Registry]

    @classmethod
    def get(cls, name: str | Enum) -> Callable[..., object]:
        part = cls._parts[_text(name)]
        return getattr(part, "of_skyrl", part)

    @classmethod
    def list_available(cls) -> list[str]:
        return cls._parts.names()

    @classmethod
    def unregister(cls, name: str | Enum) -> None:
        cls._parts.pop(_text(name), None)


class PolicyLossRegistry(_Names):
    _parts = POLICY_LOSSES

    @classmethod
    def register(cls, name: str | Enum, function: Callable[..., object]) -> None:
        POLICY_LOSSES.register(_text(name))(_loss(function))


class AdvantageEstimatorRegistry(_Names):
    _parts = ADVANTAGE_ESTIMATORS

    @classmethod
    def register(cls, name: str | Enum, function: Callable[..., object]) -> None:
        # Nobody says whether it compares groups: it is given whole batches.
        ADVANTAGE_ESTIMATORS.register(_text(name), whole_batch=True)(_estimator(function))


def sync_registries() -> None:
    """Nothing: what a program registers travels with its run."""


def _text(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def _loss(function: Callable[..., object]) -> Made:
    names = set(inspect.signature(function).parameters)
    if missing := {"log_probs", "advantages"} - names:
        raise UserError(f"policy loss {function.__name__} lacks {', '.join(sorted(missing))} among its parameters")
    rollout = next((name for name in _ROLLOUT if name in names and _reads(function, name)), "")

    def called(
        current: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: object, behaviour: Tensor | None
    ) -> object:
        columns = mask.any(0).nonzero().squeeze(1)
        if not len(columns):
            return current * 0.0
        cut = slice(int(columns[0]), int(columns[-1]) + 1)
        with torch.enable_grad():
            leaf = current.detach()[:, cut].requires_grad_()
            known = {
                "log_probs": leaf, "old_log_probs": old[:, cut], "advantages": advantages[:, cut], "config": config,
                "loss_mask": mask[:, cut].to(leaf.dtype), rollout: None if behaviour is None else behaviour[:, cut],
            }  # fmt: skip
            total, metrics = _answer(function, function(**{n: v for n, v in known.items() if n in names}))
            (slope,) = torch.autograd.grad(total, leaf)
        slopes = torch.zeros_like(current)
        slopes[:, cut] = slope
        level = total.detach() / mask.sum()
        loss = slopes * (current - current.detach()) + level
        return loss, {name: torch.full_like(slopes, value) for name, value in metrics.items()}

    def plain(current: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, *, config: object = None) -> object:
        return called(current, proximal, advantages, mask, config, None)

    def with_rollout(
        current: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, config: object = None
    ) -> object:
        return called(current, proximal, advantages, mask, config, behaviour)

    return _as_theirs(configured(config=".")(with_rollout if rollout else plain), function)


def _estimator(function: Callable[..., object]) -> Made:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    settings = {"config": ".", **{name: name for name in ("gamma", "lambd", "grpo_norm_by_std")}}

    def called(
        rewards: Tensor, mask: Tensor, group_ids: Tensor, values: Tensor | None, settings_given: dict[str, object]
    ) -> tuple[Tensor, Tensor]:
        known = {
            "token_level_rewards": rewards, "response_mask": mask.to(rewards.dtype), "index": group_ids.numpy(),
            "values": values, **settings_given,
        }  # fmt: skip
        found = function(**{name: value for name, value in known.items() if takes_all or name in parameters})
        if not isinstance(found, tuple) or len(found) != 2:
            raise UserError(f"advantage estimator {function.__name__} must return (advantages, returns)")
        advantages, returns = found
        return advantages * mask, returns * mask

    def plain(
        rewards: Tensor, mask: Tensor, group_ids: Tensor, *, config: object = None, gamma: float = 1.0,
        lambd: float = 1.0, grpo_norm_by_std: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        settings_given = {"config": config, "gamma": gamma, "lambd": lambd, "grpo_norm_by_std": grpo_norm_by_std}
        return called(rewards, mask, group_ids, None, settings_given)

    def with_values(
        rewards: Tensor, values: Tensor, mask: Tensor, group_ids: Tensor, *, config: object = None,
        gamma: float = 1.0, lambd: float = 1.0, grpo_norm_by_std: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        settings_given = {"config": config, "gamma": gamma, "lambd": lambd, "grpo_norm_by_std": grpo_norm_by_std}
        return called(rewards, mask, group_ids, values, settings_given)

    judged = "values" in parameters and _reads(function, "values")  # which asks for a critic
    return _as_theirs(configured(**settings)(with_values if judged else plain), function)


def _as_theirs(made: Made, function: Callable[..., object]) -> Made:
    """A part of the user's, which travels to other processes as one."""
    made.__module__, made.__name__, made.__doc__ = function.__module__, function.__name__, function.__doc__
    made.__dict__["of_skyrl"] = function
    return made


def _answer(function: Callable[..., object], answer: object) -> tuple[Tensor, dict[str, float]]:
    total, metrics = answer if isinstance(answer, tuple) else (answer, {})
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise UserError(f"policy loss {function.__name__} must return (loss, metrics) with one number as the loss")
    metrics = metrics if isinstance(metrics, dict) else {"clip_ratio": metrics}
    return total.reshape(()), {str(name): float(value) for name, value in metrics.items()}


def _reads(function: Callable[..., object], name: str) -> bool:
    """Whether its code looks at a parameter at all."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or name in code.co_cellvars or "locals" in code.co_names:
        return True
    loads = (step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_FAST"))
    return any(name == loaded or (isinstance(loaded, tuple) and name in loaded) for loaded in loads)
