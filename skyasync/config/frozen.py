"""The configuration after ``prepare``: a write to a group raises an error that names the key.

Invariant: parts that were made from a value cannot disagree with the configuration. A copy
(``copy.deepcopy``, ``dataclasses.replace``, what is sent to another process) can be changed.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from skyasync.errors import UserError

# in a frozen group's ``__dict__``: its dotted path, "" for the whole configuration
_PATH = "_frozen_path"


class FrozenConfigError(UserError, AttributeError):
    """A write to a settled configuration."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} cannot be changed any more: prepare() has settled the configuration, and the run's parts are "
            f"made from it; set it as an override ({path}=VALUE), or in prepare() before super().prepare()"
        )


class SettingsGroup:
    """Base of the dataclasses that hold settings. ``freeze`` makes one and its groups read-only."""

    if not TYPE_CHECKING:  # else a type checker would take any attribute for one that can be set

        def __setattr__(self, name: str, value: object) -> None:
            self._refuse_if_frozen(name)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            self._refuse_if_frozen(name)
            super().__delattr__(name)

    def _refuse_if_frozen(self, name: str) -> None:
        path = vars(self).get(_PATH)
        if path is not None:
            raise FrozenConfigError(f"{path}.{name}" if path else name)

    def __getstate__(self) -> dict[str, Any]:
        """The content of a copy, which can be changed."""
        return {name: value for name, value in vars(self).items() if name != _PATH}


def freeze(group: SettingsGroup, path: str = "") -> None:
    """Make a configuration and all groups in it read-only. Freezing twice changes nothing."""
    for item in fields(group):  # type: ignore[arg-type]  # the groups are dataclasses
        value = getattr(group, item.name)
        if isinstance(value, SettingsGroup):
            freeze(value, f"{path}.{item.name}" if path else item.name)
    vars(group)[_PATH] = path
