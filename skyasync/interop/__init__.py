"""Code and recipes of other frameworks: settings, translations, class names and adapters, a folder for each framework.

Invariant: importing this package, or a framework's folder, imports neither torch nor another room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from skyasync.interop.system import systems
from skyasync.other_frameworks import OtherFrameworks


class Interop(OtherFrameworks):
    """Asks every system for the adapter that a question is about."""

    def __init__(self) -> None:
        self.environments = tuple(self._all("environment"))
        [self.agent_file_environment] = [s.name for s in systems().values() if "agent_file" in s.adapters]

    @staticmethod
    def _all(adapter: str) -> list[Any]:
        return [system.adapter(adapter) for system in systems().values() if adapter in system.adapters]

    def titles(self) -> list[str]:
        return [system.title for system in systems().values()]

    def key_hint(self, path: str, value: object, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
        from skyasync.interop.conversion import ConversionContext
        from skyasync.interop.hints import key_hint

        return key_hint(path, value, ConversionContext(given, given, defaults))

    def value_hint(self, path: str, value: Any) -> str:  # noqa: ANN401  (of any type)
        from skyasync.interop.hints import value_hint

        return value_hint(path, value)

    def variables(self) -> Mapping[str, tuple[str, str]]:
        return {
            name: (system.title, row.targets[0].path)
            for system in systems().values()
            for name, row in system.table.variables.items()
        }

    def translate(self, argv: Sequence[str]) -> None:
        from skyasync.interop.command import translate

        translate(argv)

    def reward_signatures(self) -> Sequence[object]:
        return [signature() for signature in self._all("reward_signature")]

    def remote_reward(self, addresses: str) -> Callable[..., Any]:
        [function] = self._all("remote_reward")
        found: Callable[..., Any] = function(addresses)
        return found

    def modules_for_user_files(self) -> AbstractContextManager[None]:
        [stand_ins] = self._all("user_modules")
        found: AbstractContextManager[None] = stand_ins()
        return found

    def settle_agent_file(self, cfg: object) -> None:
        [settle] = self._all("agent_file")
        settle(cfg)

    def agent_program(self, agent_class: type, settings: Mapping[str, object]) -> Callable[..., Any]:
        [program_of] = self._all("agent_class")
        found: Callable[..., Any] = program_of(agent_class, settings)
        return found
