"""A function's own signature says what it needs: tensors by position, settings by keyword.

Invariant: the names of a registered function's positional parameters are all there is to know about
which log-probabilities it uses; its keyword-only parameters are its settings. ``configured`` names
the configuration keys that feed them; the free table ``trainer.algorithm.extra`` can set any of
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from skyasync.errors import UserError, unknown
from skyasync.registry import declared

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
T = TypeVar("T")

_MISSING = object()  # not None, which a setting may be


def configured(**keys: str) -> Callable[[F], F]:
    """Feed these keyword-only parameters from these keys under ``trainer.algorithm``.

    Keys of nested groups have dots.
    """

    def mark(function: F) -> F:
        function.configuration_keys = keys  # type: ignore[attr-defined]
        return function

    return mark


def setting(cfg: object, key: str, default: T) -> T:
    """The value of ``key`` ("eps_clip_low", "kl_ctrl.horizon") in ``cfg``, or ``default``.

    "." is ``cfg`` itself.
    """
    value: Any = cfg
    if key == ".":
        return value
    for name in key.split("."):
        if isinstance(value, Mapping):
            value = value.get(name, _MISSING)
        else:
            value = getattr(value, name, _MISSING)
        if value is _MISSING:
            return default
    return value


@dataclass(frozen=True)
class Bound(Generic[R]):
    """A function with its settings filled in.

    Args:
        inputs: names of the tensors that it takes, in order.
    """

    function: Callable[..., R]
    inputs: tuple[str, ...]
    settings: dict[str, Any]

    def __call__(self, tensors: Mapping[str, Any]) -> R:
        arguments = [tensors[name] for name in self.inputs]
        return self.function(*arguments, **self.settings)


def parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the tensors that ``function`` takes, and its settings with their defaults."""
    inputs = []
    settings = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            inputs.append(parameter.name)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            settings[parameter.name] = parameter.default
    return tuple(inputs), settings


def bind(function: Callable[..., R], cfg: object) -> Bound[R]:
    """Fill in the settings of ``function`` from ``cfg``.

    Its own keys come first, then ``cfg.extra`` by parameter name.
    """
    inputs, settings = parameters(function)
    keys = declared(function, "configuration_keys", {})
    extra: Mapping[str, Any] = setting(cfg, "extra", {}) or {}
    for name, default in settings.items():
        if name in extra:
            settings[name] = extra[name]
        elif name in keys:
            settings[name] = setting(cfg, keys[name], default)
    return Bound(function, inputs, settings)


def refuse_unused_extra(cfg: object, *functions: Callable[..., Any]) -> None:
    """Raise if ``cfg.extra`` names a setting that none of ``functions`` has.

    Raises:
        UserError: with the nearest name and all that these functions accept.
    """
    accepted_names: set[str] = set()
    for function in functions:
        _, settings = parameters(function)
        accepted_names |= settings.keys()
    extra: Mapping[str, Any] = setting(cfg, "extra", {}) or {}
    for name in extra:
        if name not in accepted_names:
            raise UserError(unknown("setting in trainer.algorithm.extra", name, accepted_names))
