"""Code and recipes of other frameworks: settings, translations, class names and adapters, a folder for each framework.

Invariant: importing this package, or a framework's folder, imports neither torch nor another room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyasync.interop.system import systems
from skyasync.other_frameworks import Foreign, OtherFrameworks


class Interop(OtherFrameworks):
    """Asks every system for the adapter that a question is about."""

    def __init__(self) -> None:
        playing_rows = [system for system in systems().values() if "environment" in system.adapters]
        self.environments = {system.adapter("environment"): system.name for system in playing_rows}
        [playing] = [system for system in systems().values() if "agent_file" in system.adapters]
        self.agent_file_environment, self.agent_file_programs = playing.name, playing.agent_programs

    @staticmethod
    def _all(adapter: str) -> list[Foreign]:
        return [system.adapter(adapter) for system in systems().values() if adapter in system.adapters]

    def _one(self, adapter: str) -> Foreign:
        [found] = self._all(adapter)
        return found

    def titles(self) -> list[str]:
        return [system.title for system in systems().values()]

    def key_hint(self, path: str, value: object, given: Mapping[str, Foreign], defaults: Mapping[str, Foreign]) -> str:
        from skyasync.interop.conversion import ConversionContext
        from skyasync.interop.hints import key_hint

        return key_hint(path, value, ConversionContext(given, given, defaults))

    def value_hint(self, path: str, value: Foreign) -> str:
        from skyasync.interop.hints import value_hint

        return value_hint(path, value)

    def variables(self) -> Mapping[str, tuple[str, str]]:
        named = [(system.title, system.table.variables) for system in systems().values()]
        return {name: (title, row.targets[0].path) for title, rows in named for name, row in rows.items()}

    def translate(self, argv: Sequence[str]) -> None:
        from skyasync.interop.command import translate

        translate(argv)

    def reward_signatures(self) -> Sequence[Foreign]:
        return [signature() for signature in self._all("reward_signature")]

    def remote_reward(self, addresses: str) -> Foreign:
        return self._one("remote_reward")(addresses)

    def modules_for_user_files(self) -> Foreign:
        return self._one("user_modules")()

    def settle_agent_file(self, cfg: Foreign) -> None:
        self._one("agent_file")(cfg)

    def agent_program(self, agent_class: type, settings: Mapping[str, object]) -> Foreign:
        return self._one("agent_class")(agent_class, settings)
