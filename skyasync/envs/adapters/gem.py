"""Environments in the form of gem and gymnasium.

``reset(seed)`` returns an observation and info, ``step`` five values.

``environment.env_class=my_file:MyEnv`` names such a class itself. It is made with those of the
row's columns (or of ``environment.env_config``) that it has parameters for, and reset with the
row's ``seed``. It gets the model's text, or the number in it if its ``action_space`` is discrete.
The model sees ``env_instruction`` and ``suffix`` of ``info`` with the observation. Numbers under
``metrics`` are metrics: the last ones, or as ``metrics_agg_mode`` says (ROLL's environments).

Invariant: the same row gives the same episode, as far as its seed decides it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

from skyasync.envs import ENVS, Foreign
from skyasync.envs.adapters import GameEnv
from skyasync.envs.base import EnvConfig, InvalidEnvOutputError, Metrics, Row
from skyasync.errors import UserError
from skyasync.registry import resolve_reference
from skyasync.rewards.signature import single_value

#: The beginnings of gem's ids, such as "game:GuessTheNumber-v0-easy" and "rg:chain_sum".
GEM_FAMILIES = ("game", "rg", "logic", "math", "code", "qa", "eval")

#: How ``metrics_agg_mode`` combines a metric's values; any other mode is their mean.
MODES: dict[str, Callable[[list[float]], float]] = {
    "last": itemgetter(-1),
    "max": max,
    "min": min,
    "sum": sum,
}


@ENVS.register("gem")
class GemEnv(GameEnv):
    """Settings besides those of ``GameEnv``, in the row or in ``environment.env_config``:

    Args:
        gem_env: ``module:Class``, or an id that gem knows, if it is installed.
    """

    made_from: Foreign = None

    def __init__(self, env_config: EnvConfig | None = None, extras: Row | None = None) -> None:
        super().__init__(env_config, extras)
        make = self.made_from or _named(self.settings)
        parameters = inspect.signature(make).parameters
        arguments = {name: self.settings[name] for name in parameters if name in self.settings}
        self._env = make(**arguments)
        self._observation: Foreign = ""
        self._info: Mapping[str, Any] = {}
        self._metrics: dict[str, list[float]] = {}
        self._modes: dict[str, str] = {}

    def start(self) -> str:
        returned = self._env.reset(seed=self.seed)
        if isinstance(returned, tuple) and len(returned) == 2:
            self._observation, self._info = returned
        else:  # gym before 0.26 returns the observation alone
            self._observation = returned
            self._info = {}
        texts = (self._info.get("env_instruction"), self.observe())
        return "\n".join(text for text in texts if text)

    def play(self, action: str) -> tuple[float, bool]:
        returned = self._env.step(self._action(action))
        if not isinstance(returned, tuple) or len(returned) not in (4, 5):
            raise InvalidEnvOutputError(
                f"step must return (observation, reward, terminated, truncated, info), as in gem and gymnasium; it "
                f"returned {returned!r:.80}"
            )
        # ``end_flags`` is terminated and truncated, or done alone in gym before 0.26.
        self._observation, reward, *end_flags, info = returned
        self._info = info or {}
        self._modes |= self._info.get("metrics_agg_mode") or {}
        for name, value in (self._info.get("metrics") or {}).items():
            number = single_value(value)
            if isinstance(number, float):
                self._metrics.setdefault(str(name), []).append(number)
        return float(reward), any(map(bool, end_flags))

    def observe(self) -> str:
        observation = self._observation
        if not isinstance(observation, str) and getattr(self._env, "render_mode", "") == "ansi":
            observation = self._env.render()
        return f"{observation}{self._info.get('suffix', '')}"

    def get_metrics(self) -> Metrics:
        metrics = {}
        for name, values in self._metrics.items():
            combine = MODES.get(self._modes.get(name, "last"))
            if combine:
                metrics[name] = combine(values)
            else:
                metrics[name] = sum(values) / len(values)
        return {**metrics, "steps": float(self.turns)}

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    def _action(self, text: str) -> str | int:
        """The text; for discrete actions the last one that it names, or else the first action."""
        match self._env:
            case object(action_space=object(n=count, start=start)):  # gymnasium's Discrete
                actions = range(int(start), int(start) + int(count))
            case object(action_space=object(n=count)):
                actions = range(int(count))
            case _:
                return text
        # At most 18 digits: Python refuses to convert thousands, and no action has that number.
        for digits in reversed(re.findall(r"(?<!\d)\d{1,18}(?!\d)", text)):
            if int(digits) in actions:
                return int(digits)
        return actions.start


def played_by_gem(env_class: type, kwargs: Mapping[str, object]) -> type[GemEnv]:
    """The environment that plays a class of this form."""
    # staticmethod: a class attribute that is a function would become a method.
    attributes = {"made_from": staticmethod(env_class), "made_with": dict(kwargs)}
    return type(env_class.__name__, (GemEnv,), attributes)


def _named(settings: Mapping[str, Any]) -> Callable[..., Foreign]:
    name = settings.get("gem_env")
    if not name:
        raise UserError(
            "gem needs gem_env, as a column of the row or in environment.env_config: module:Class or an id"
        )
    kind, colon, _ = name.partition(":")
    if colon and kind not in GEM_FAMILIES:
        env_class: Callable[..., Foreign] = resolve_reference(name, kind="gem_env")
        return env_class
    try:
        import gem
    except ModuleNotFoundError:
        raise UserError("gem is not installed; add it with: uv pip install gem-llm") from None
    return partial(gem.make, name)
