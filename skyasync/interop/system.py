"""Another framework: its name, its table of settings, and what adapts its recipes and classes.

Each folder here is one, and declares ``SYSTEM``. It has a table of its settings (``settings.tsv``: see
``settings.py``) and ``translate.py``: ``CONVERSIONS`` are functions for the table, and ``finish(draft)`` decides about
keys that depend on each other, after each was carried over alone.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyasync.interop.settings import Table

_FOLDER = Path(__file__).parent
SETTINGS = "settings.tsv"


@dataclass(frozen=True)
class System:
    """A framework whose recipes, files and classes are understood.

    Args:
        name: of its folder, and of ``--from``.
        order: its place in help and documentation.
        adapters: what it brings, as ``module:attribute`` of its folder (imported when it is needed):

            - ``environment``: a module that registers an environment
            - ``reward_signature``: a ``skyasync.rewards.signature.Signature``
            - ``remote_reward``, ``user_modules``, ``agent_file``, ``agent_class``: what ``OtherFrameworks`` asks for
            - ``program``: reads a recipe that is a Python program
        command: the word of a command line after which the recipe's name and flags follow.
        agent_programs: play its agent files that have a loop of their own: the reference, and its former ones.
        has_our_keys: it spells most keys as we do; those that its table lacks are ours.
    """

    name: str
    title: str
    order: int
    adapters: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    agent_programs: tuple[str, ...] = ()
    has_our_keys: bool = False

    def adapter(self, name: str) -> Any:  # noqa: ANN401  (one of many kinds)
        module, colon, attribute = self.adapters[name].partition(":")
        path = f"{__package__}.{self.name}.{module}"
        return getattr(import_module(path), attribute) if colon else path

    @cached_property
    def translation(self) -> ModuleType:
        """Its ``translate.py``: ``CONVERSIONS`` of its table, and ``finish(draft)``."""
        return import_module(f"{__package__}.{self.name}.translate")

    @cached_property
    def table(self) -> Table:
        from skyasync.interop.settings import Table

        return Table.read(_FOLDER / self.name / SETTINGS)


@cache
def systems() -> dict[str, System]:
    """All of them by name, in their order: the folders that have a table of settings."""
    packages = [module.name for module in pkgutil.iter_modules([str(_FOLDER)]) if module.ispkg]
    folders = [name for name in packages if (_FOLDER / name / SETTINGS).is_file()]
    declared = [import_module(f"{__package__}.{folder}").SYSTEM for folder in folders]
    return {system.name: system for system in sorted(declared, key=lambda system: system.order)}
