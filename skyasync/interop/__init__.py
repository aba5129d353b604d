"""Code and recipes of other frameworks: settings, translations and adapters.

There is a folder for each framework. Invariant: importing this package, or a framework's folder,
imports neither torch nor another package of the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skyasync.interop.system import systems
from skyasync.other_frameworks import Foreign, OtherFrameworks


class Interop(OtherFrameworks):
    """The adapters of all frameworks, behind the interface that the library calls."""

    def __init__(self) -> None:
        environments = {}
        for system in systems().values():
            if "environment" in system.adapters:
                environments[system.adapter("environment")] = system.name
            if "agent_file" in system.adapters:
                self.agent_file_environment = system.name
                self.agent_file_program = system.agent_program
        self.environments = environments

    @staticmethod
    def _adapters(name: str) -> list[Foreign]:
        return [system.adapter(name) for system in systems().values() if name in system.adapters]

    def titles(self) -> list[str]:
        return [system.title for system in systems().values()]

    def key_hint(
        self,
        path: str,
        value: object,
        given: Mapping[str, Foreign],
        defaults: Mapping[str, Foreign],
    ) -> str:
        # Here and below imports are local, because the library imports this module at start.
        from skyasync.interop.conversion import ConversionContext, key_hint

        # A command line may mix our names and a framework's.
        return key_hint(path, value, ConversionContext(given, given, defaults))

    def value_hint(self, path: str, value: Foreign) -> str:
        from skyasync.interop.conversion import value_hint

        return value_hint(path, value)

    def variables(self) -> Mapping[str, tuple[str, str]]:
        variables = {}
        for system in systems().values():
            for name, row in system.table.variables.items():
                variables[name] = (system.title, row.targets[0].path)
        return variables

    def translate(self, argv: Sequence[str]) -> None:
        from skyasync.interop.translation import translate

        translate(argv)

    def reward_signatures(self) -> Sequence[Foreign]:
        return [signature() for signature in self._adapters("reward_signature")]

    def remote_reward(self, addresses: str) -> Foreign:
        [remote] = self._adapters("remote_reward")
        return remote(addresses)

    def modules_for_user_files(self) -> Foreign:
        [modules] = self._adapters("user_modules")
        return modules()

    def settle_agent_file(self, cfg: Foreign) -> None:
        [settle] = self._adapters("agent_file")
        settle(cfg)

    def agent_program(self, agent_class: type, settings: Mapping[str, object]) -> Foreign:
        [program] = self._adapters("agent_class")
        return program(agent_class, settings)

    def tinker_server(self, cfg: Foreign, folder: str, host: str, port: int) -> Foreign:
        from skyasync.interop.tinker.experiment import serve

        return serve(cfg, folder, host, port)
