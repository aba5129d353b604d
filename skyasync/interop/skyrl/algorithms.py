"""SkyRL's registries of losses and advantage estimators, whose functions have other parameters and return a sum.

A loss of theirs gives one number for a batch. Its derivative by each log-probability is what each token is trained
with, weighed by ``trainer.algorithm.loss_reduction`` as every loss is here. That is SkyRL's own rule, which weighs the
advantages instead, for every loss that is proportional to them.

Invariant: a loss that never reads ``rollout_logprobs`` does not count as one that corrects for stale samples.
Sources: ``skyrl/backends/skyrl_train/utils/ppo_utils.py`` and SkyRL's page on custom algorithms.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from inspect import Parameter
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyasync.algorithms.binding import configured
from skyasync.errors import UserError
from skyasync.registry import Registry, accepted

Function = Callable[..., object]
F = TypeVar("F", bound=Function)
_ROLLOUT = ("rollout_logprobs", "rollout_log_probs")
_ESTIMATOR_SETTINGS = {"gamma": 1.0, "lambd": 1.0, "grpo_norm_by_std": True}


class SkyRLRegistry:
    """A registry of ours by SkyRL's methods; ``_adapted`` makes a part of ours from a function of theirs."""

    _parts: ClassVar[Registry]
    _adapted: ClassVar[staticmethod[[Function], Function]]
    _capabilities: ClassVar[Mapping[str, object]] = MappingProxyType({})

    @classmethod
    def register(cls, name: str | Enum, function: Function) -> None:
        cls._parts.register(_text(name), **cls._capabilities)(cls._adapted(function))

    @classmethod
    def decorator(cls, name: str | Enum) -> Callable[[F], F]:
        """Registers the decorated function, which the setting ``name`` then selects."""

        def add(function: F) -> F:
            cls.register(name, function)
            return function

        return add

    @classmethod
    def get(cls, name: str | Enum) -> Function:
        """Their function, or ours if it was not registered here."""
        part: Function = cls._parts[_text(name)]
        theirs: Function = part.__dict__.get("of_skyrl", part)
        return theirs

    @classmethod
    def list_available(cls) -> list[str]:
        return cls._parts.names()

    @classmethod
    def unregister(cls, name: str | Enum) -> None:
        cls._parts.pop(_text(name), None)


def sync_registries() -> None:
    """Does nothing: what a program registers is sent to the processes of its run."""


def _text(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def _loss(function: Function) -> Function:
    names = set(inspect.signature(function).parameters)
    if missing := {"log_probs", "advantages"} - names:
        raise UserError(f"policy loss {function.__name__} lacks {', '.join(sorted(missing))} among its parameters")
    rollout = next((name for name in _ROLLOUT if name in names and _reads(function, name)), "")

    def call(tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> object:
        current, mask = tensors["current"], tensors["mask"]
        columns = mask.any(0).nonzero().squeeze(1)
        if not len(columns):
            return current * 0.0
        response = slice(int(columns[0]), int(columns[-1]) + 1)
        cut = {name: tensor[:, response] for name, tensor in tensors.items()}
        with torch.enable_grad():
            leaf = cut["current"].detach().requires_grad_()
            known = {
                "log_probs": leaf,
                "old_log_probs": cut["proximal"],
                "advantages": cut["advantages"],
                **settings,
                "loss_mask": cut["mask"].to(leaf.dtype),
                rollout: cut.get("behaviour"),
            }
            answer: Any = function(**{name: value for name, value in known.items() if name in names})
            total, metrics = answer if isinstance(answer, tuple) else (answer, {})
            if not isinstance(total, Tensor) or total.numel() != 1:
                raise UserError(
                    f"policy loss {function.__name__} must return (loss, metrics) with one number as the loss"
                )
            total = total.reshape(())
            (slope,) = torch.autograd.grad(total, leaf)
        slopes = torch.zeros_like(current)
        slopes[:, response] = slope
        loss = slopes * (current - current.detach()) + total.detach() / mask.sum()
        metrics = metrics if isinstance(metrics, dict) else {"clip_ratio": metrics}
        return loss, {str(name): torch.full_like(slopes, float(value)) for name, value in metrics.items()}

    behaviour = ["behaviour"] if rollout else []
    return _part(function, call, ["current", "proximal", *behaviour, "advantages", "mask"], {"config": None})


def _estimator(function: Function) -> Function:
    parameters = inspect.signature(function).parameters

    def call(tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> tuple[Tensor, Tensor]:
        rewards, mask = tensors["rewards"], tensors["mask"]
        known = {
            "token_level_rewards": rewards,
            "response_mask": mask.to(rewards.dtype),
            "index": tensors["group_ids"].numpy(),
            "values": tensors.get("values"),
            **settings,
        }
        answer = function(**accepted(function, known))
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise UserError(f"advantage estimator {function.__name__} must return (advantages, returns)")
        advantages, returns = answer
        return advantages * mask, returns * mask

    # A function that reads the values needs a critic.
    values = ["values"] if "values" in parameters and _reads(function, "values") else []
    return _part(function, call, ["rewards", *values, "mask", "group_ids"], {"config": None, **_ESTIMATOR_SETTINGS})


def _part(
    function: Function,
    call: Callable[[Mapping[str, Tensor], Mapping[str, object]], object],
    inputs: list[str],
    settings: dict[str, object],
) -> Function:
    """A part of ours with these tensors and settings as parameters; as the user's, it is sent to other processes."""

    def part(*tensors: Tensor, **given: object) -> object:
        return call(dict(zip(inputs, tensors, strict=True)), settings | given)

    positional = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in inputs]
    named = [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in settings.items()]
    part.__signature__ = inspect.Signature([*positional, *named])  # type: ignore[attr-defined]
    part.__module__, part.__name__, part.__doc__ = function.__module__, function.__name__, function.__doc__
    part.__dict__["of_skyrl"] = function
    return configured(**{name: "." if name == "config" else name for name in settings})(part)


def _reads(function: Function, name: str) -> bool:
    """Whether its code reads a parameter at all."""
    function = inspect.unwrap(function)
    function = function.__func__ if inspect.ismethod(function) else function
    if not inspect.isfunction(function):
        return True
    code = function.__code__
    if name in code.co_cellvars or "locals" in code.co_names:
        return True
    loads = (step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_FAST"))
    return any(name == loaded or (isinstance(loaded, tuple) and name in loaded) for loaded in loads)


class PolicyLossRegistry(SkyRLRegistry):
    _parts, _adapted = POLICY_LOSSES, staticmethod(_loss)


class AdvantageEstimatorRegistry(SkyRLRegistry):
    _parts, _adapted = ADVANTAGE_ESTIMATORS, staticmethod(_estimator)
    _capabilities = MappingProxyType({"whole_batch": True})  # a function may compare groups


register_policy_loss = PolicyLossRegistry.decorator
register_advantage_estimator = AdvantageEstimatorRegistry.decorator
