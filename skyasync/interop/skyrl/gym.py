"""SkyRL's environments: ``BaseTextEnv``, tool groups, ``register`` and ``make``.

Invariant: an episode of such a class gives what ``skyasync.envs`` lets an environment give. Its
metrics may be truth values and texts, as there: truth values are numbers here, texts are left out.
Source: ``skyrl_gym``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from skyasync import envs
from skyasync.envs import Foreign, env_factory, register
from skyasync.envs.base import BaseTextEnvStepOutput, Conversation, InvalidEnvOutputError
from skyasync.rewards.signature import single_value

__all__ = [
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "ConversationType",
    "Env",
    "ToolGroup",
    "make",
    "register",
    "tool",
]

ConversationType = Conversation
F = TypeVar("F", bound=Callable[..., object])
log = logging.getLogger(__name__)


class AttributeDict(dict[str, Any]):
    """A mapping whose entries are attributes as well, at every depth."""

    def __init__(self, values: Mapping[str, object] | None = None) -> None:
        super().__init__()
        for name, value in (values or {}).items():
            self[name] = AttributeDict(value) if isinstance(value, Mapping) else value

    def __getattr__(self, name: str) -> Foreign:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"environment.env_config has no {name!r}; it has: {', '.join(self)}"
            ) from None


class tool:
    """Decorator for a method of a tool group."""

    def __init__(self, func: Callable[..., object]) -> None:
        self.func = func
        self.name = func.__name__

    def __get__(self, instance: object, owner: type) -> Foreign:
        if instance is None:
            return self
        return self.func.__get__(instance, owner)


class ToolGroup:
    """Tools that share a state."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tool_registry: dict[str, Foreign] = {}
        # getmembers_static, because getmembers would return bound methods, not the decorators.
        for _, member in inspect.getmembers_static(type(self)):
            if isinstance(member, tool):
                self._tool_registry[member.name] = member.__get__(self, type(self))

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., object] | None:
        return self._tool_registry.get(name)

    def get_tool_names(self) -> list[str]:
        return list(self._tool_registry)

    def execute_tool(self, name: str, *args: object, **kwargs: object) -> Foreign:
        if name not in self._tool_registry:
            raise ValueError(
                f"tool {name!r} is not in the group {self.name!r}: {', '.join(self._tool_registry)}"
            )
        return self._tool_registry[name](*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self._tool_registry, self.name)


class SkyRLEnv(envs.BaseTextEnv):
    """As in SkyRL: ``super().__init__()`` without arguments, ``max_turns`` and tool groups."""

    tool_groups: list[ToolGroup]
    tool_to_toolgroup: dict[str, str]

    def __init__(
        self, env_config: Foreign = None, extras: dict[str, Any] | None = None, **kwargs: object
    ) -> None:
        super().__init__(env_config, extras)
        self.max_turns = int(self.extras.get("max_turns", 1))  # SkyRL's default
        # A subclass calls it with its groups.
        self.init_tool_groups([])

    def init_tool_groups(self, tool_groups: list[ToolGroup] | None = None) -> None:
        self.tool_groups = list(tool_groups or ())
        self.tool_to_toolgroup = {}
        for group in self.tool_groups:
            self.tool_to_toolgroup |= group.get_tool_to_group_mapping()

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Foreign) -> Foreign:
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        names = ", ".join(group.name for group in self.tool_groups)
        raise ValueError(f"there is no tool group {tool_group_name!r}: {names}")

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Means of the numbers, as all metrics are aggregated here."""
        columns: dict[str, list[float]] = {}
        for episode in metrics:
            for name, value in numbers(episode).items():
                columns.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in columns.items()}

    @classmethod
    def as_environment(cls, name: str, kwargs: Mapping[str, object]) -> type[envs.BaseTextEnv]:
        """The class that plays its episodes, for ``skyasync.envs``."""
        if cls.aggregate_metrics is not SkyRLEnv.aggregate_metrics:
            log.warning(
                "%s.aggregate_metrics is not called: an environment's metrics are averaged",
                cls.__name__,
            )
        attributes = {"spec_name": name, "spec_kwargs": dict(kwargs)}
        # The user's class stays as it is; the name is for messages and metrics.
        return type(cls.__name__, (_GymEpisode, cls), attributes)


# SkyRL has both names.
BaseTextEnv = Env = SkyRLEnv


class _GymEpisode:
    """The base class before a user's class: it adapts its arguments and its results."""

    spec_name: ClassVar[str] = ""
    spec_kwargs: ClassVar[dict[str, object]] = {}

    def __init__(
        self, env_config: Mapping[str, Any] | None = None, extras: dict[str, Any] | None = None
    ) -> None:
        config = env_config or {}
        # The settings of an environment may be a group with its name.
        if isinstance(config.get(self.spec_name), Mapping):
            config = config[self.spec_name]
        arguments = {
            "env_config": AttributeDict(config),
            "extras": dict(extras or {}),
            **self.spec_kwargs,
        }
        super().__init__(**arguments)
        # A user's class may not pass them to super().__init__.
        for name in ("env_config", "extras"):
            if not getattr(self, name, None):
                setattr(self, name, arguments[name])

    def step(self, action: str) -> Foreign:
        output = super().step(action)  # type: ignore[misc]
        if not isinstance(output, Mapping):
            return output
        if output.get("postprocessed_action") not in (None, action):
            raise InvalidEnvOutputError(
                "step returned a postprocessed_action that is not the action: the model is trained on the tokens that "
                "it wrote, which are never made again from text"
            )
        return output

    def get_metrics(self) -> dict[str, float]:
        return numbers(super().get_metrics())  # type: ignore[misc]


def make(id: str, **kwargs: Foreign) -> envs.BaseTextEnv:
    """An environment to be played by hand."""
    env_config = kwargs.pop("env_config", {})
    extras = kwargs.pop("extras", {})
    return env_factory(id, kwargs)(env_config=env_config, extras=extras)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers or truth values, also arrays and tensors of one."""
    values = {}
    for name, entry in metrics.items():
        value = single_value(entry)
        if isinstance(value, float):
            values[str(name)] = value
    return values
