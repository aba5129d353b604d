"""Environments in the form of gem and gymnasium: ``reset(seed)`` gives an observation and info, ``step`` five values.

``environment.env_class=my_file:MyEnv`` names such a class itself. It is made with those of the row's columns (or of
``environment.env_config``) that it has parameters for, reset with the row's ``seed``, and given the model's text; one
whose ``action_space`` is discrete is given the number that stands in it. What ``info`` has under ``env_instruction`` or
``suffix`` is shown with the observation, and numbers under ``metrics`` are metrics: the last ones, or as
``metrics_agg_mode`` says (ROLL's environments).

Invariant: the same row gives the same episode, as far as its seed decides it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Conversation, InvalidEnvOutputError, with_text_below
from skyasync.envs.registry import ENVS, Foreign
from skyasync.errors import UserError
from skyasync.registry import resolve_reference


@ENVS.register("gem")
class GemEnv(BaseTextEnv):
    """Settings are the row's columns, or else those in ``environment.env_config`` (ROLL's ``env_config``).

    Args (of these settings):
        gem_env: ``module:Class``, or an id that gem knows, if it is installed.
        seed: of the episode.
        max_steps: the episode ends after so many answers; 0 leaves it to the environment.
    """

    made_from: Foreign = None
    made_with: Mapping[str, object] = {}

    def __init__(self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        settings = {**self.env_config, **self.extras, **self.made_with}
        self._seed, self._max_steps = int(settings.get("seed", 0)), int(settings.get("max_steps", 0))
        make = self.made_from or _named(settings)
        self._env = make(**_taken(make, settings))
        self._metrics: dict[str, list[float]] = {}
        self._modes: dict[str, str] = {}

    def init(self, prompt: Conversation) -> tuple[Conversation, dict[str, Any]]:
        """The row's prompt with the instruction and the first observation below it."""
        begun = self._env.reset(seed=self._seed)
        observation, info = begun if isinstance(begun, tuple) and len(begun) == 2 else (begun, {})
        text = "\n".join(part for part in (info.get("env_instruction"), self._shown(observation, info)) if part)
        return with_text_below(prompt, text), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        returned = self._env.step(self._action(action))
        if not isinstance(returned, tuple) or len(returned) not in (4, 5):
            raise InvalidEnvOutputError(
                f"step must return (observation, reward, terminated, truncated, info), as in gem and gymnasium; it "
                f"returned {returned!r:.80}"
            )
        observation, reward, *ended, info = returned
        self._note(info or {})
        done = any(map(bool, ended)) or self.turns == self._max_steps
        observations = [] if done else [{"role": "user", "content": self._shown(observation, info or {})}]
        return {"observations": observations, "reward": float(reward), "done": done, "metadata": {}}

    def get_metrics(self) -> dict[str, float]:
        told = {name: values[-1] if self._modes.get(name, "last") == "last" else _folded(values, self._modes[name])
                for name, values in self._metrics.items()}  # fmt: skip
        return {**told, "steps": float(self.turns)}

    def close(self) -> None:
        getattr(self._env, "close", lambda: None)()

    def _action(self, text: str) -> str | int:
        """The text; for discrete actions the last number in it that is one, or else the first action."""
        space = getattr(self._env, "action_space", None)
        count = getattr(space, "n", None)
        if count is None:
            return text
        first = int(getattr(space, "start", 0))
        numbers = [int(found) for found in re.findall(r"\d+", text)]
        return next((n for n in reversed(numbers) if first <= n < first + int(count)), first)

    def _shown(self, observation: Foreign, info: Mapping[str, Any]) -> str:
        render = getattr(self._env, "render", None)
        if not isinstance(observation, str) and render is not None and getattr(self._env, "render_mode", "") == "ansi":
            observation = render()
        return f"{observation}{info.get('suffix', '')}"

    def _note(self, info: Mapping[str, Any]) -> None:
        self._modes |= info.get("metrics_agg_mode") or {}
        for name, value in (info.get("metrics") or {}).items():
            if isinstance(value, bool | int | float) or hasattr(value, "item"):
                self._metrics.setdefault(str(name), []).append(float(value))


def played_by_gem(env_class: type, kwargs: Mapping[str, object]) -> type[GemEnv]:
    """The environment that plays a class of this form."""
    return type(env_class.__name__, (GemEnv,), {"made_from": staticmethod(env_class), "made_with": dict(kwargs)})


def _named(settings: Mapping[str, Any]) -> Callable[..., Foreign]:
    name = settings.get("gem_env")
    if not name:
        raise UserError("gem needs gem_env, as a column of the row or in environment.env_config: module:Class or an id")
    if ".py:" in name or (":" in name and "-v" not in name):
        found: Callable[..., Foreign] = resolve_reference(name, kind="gem_env")
        return found
    try:
        import gem
    except ModuleNotFoundError:
        raise UserError("gem is not installed; add it with: uv pip install gem-llm") from None

    def make(**settings: object) -> Foreign:
        return gem.make(name, **settings)

    return make


def _taken(make: Callable[..., Foreign], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that it has parameters for, by name."""
    return {name: settings[name] for name in inspect.signature(make).parameters if name in settings}


def _folded(values: list[float], mode: str) -> float:
    if mode in ("max", "min"):
        return max(values) if mode == "max" else min(values)
    return sum(values) / (1 if mode == "sum" else len(values))
