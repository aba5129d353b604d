"""Support of other frameworks' code and recipes, which ``skyasync.interop`` has if it is installed.

Invariant: no other module outside of ``skyasync.interop`` imports it, and the library trains
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, NoReturn

from skyasync.errors import UserError

_PACKAGE = "skyasync.interop"
Foreign = Any  # objects of the user, or of modules that import this one

#: Stands for an unknown value: ``--flag`` alone, or a key without ``=``.
UNKNOWN = object()


class OtherFrameworks:
    """The interface of ``skyasync.interop``, with the defaults if that is not installed."""

    #: Modules that register environments, and the environments' names.
    environments: Mapping[str, str] = MappingProxyType({})

    #: The environment that plays agent files.
    agent_file_environment = ""

    #: The program that plays agent files with a loop of their own.
    agent_file_program = ""

    def titles(self) -> list[str]:
        """The names of the supported frameworks."""
        return []

    def key_hint(
        self,
        path: str,
        value: Foreign,
        settings: Mapping[str, Foreign],
        defaults: Mapping[str, Foreign],
    ) -> str:
        """The setting of skyasync for a key of another framework, "" if none has this key.

        Args:
            value: the value to set, or ``UNKNOWN``.
            settings: all settings, by keys of any framework: some units depend on other keys.
            defaults: the defaults of skyasync's keys.
        """
        return ""

    def value_hint(self, path: str, value: Foreign) -> str:
        """The value of the key ``path`` for another framework's value, "" if none has it."""
        return ""

    def variables(self) -> Mapping[str, tuple[str, str]]:
        """Environment variables of other frameworks: name -> framework and key of skyasync."""
        return {}

    def translate(self, argv: Sequence[str]) -> None:
        """Print a recipe of another framework as a configuration of skyasync."""
        _missing("translate")

    def reward_signatures(self) -> Sequence[Foreign]:
        """Instances of ``skyasync.rewards.signature.Signature``."""
        return ()

    def remote_reward(self, addresses: str) -> Callable[..., Foreign]:
        """The reward function that asks the servers at these addresses."""
        _missing(f"environment.reward_funcs={addresses}")

    def modules_for_user_files(self) -> AbstractContextManager[None]:
        """A context in which files can import names of frameworks that are not installed."""
        return nullcontext()

    def settle_agent_file(self, cfg: Foreign) -> None:
        """Choose the environment or program that plays ``generator.agent_func_path``."""
        _missing(f"generator.agent_func_path={cfg.generator.agent_func_path}")

    def agent_program(
        self, agent_class: type, settings: Mapping[str, object]
    ) -> Callable[..., Foreign]:
        """A program that plays episodes with an object of this class, made with these settings."""
        _missing(f"the class {agent_class.__name__} in generator.agent_program")

    def tinker_server(self, cfg: Foreign, folder: str, host: str, port: int) -> Foreign:
        """The experiment whose ``run`` serves the Tinker API."""
        _missing("skyasync tinker")


def _missing(feature: str) -> NoReturn:
    raise UserError(f"{feature} needs {_PACKAGE}, which is not part of this installation")


@cache
def other_frameworks() -> OtherFrameworks:
    """The support in ``skyasync.interop``, or the defaults above."""
    try:
        interop: OtherFrameworks = import_module(_PACKAGE).Interop()
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:  # the package is there, and something that it imports is not
            raise
        return OtherFrameworks()
    return interop
