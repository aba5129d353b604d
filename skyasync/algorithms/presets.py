"""Consistent bundles of settings by name, of ``presets.yaml``.

Each has the paper or system that it comes from.

Invariant: a preset is a bundle of defaults: keys that the user gives override it. It imports no
torch. Every key exists in the schema (a test holds it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from skyasync.registry import Registry

PRESETS = Registry("preset")


@dataclass(frozen=True)
class Preset:
    """A bundle of settings.

    Args:
        source: whose bundle it is, and what must be set in addition.
        settings: full key -> value.
    """

    source: str
    settings: dict[str, Any]


def apply_preset(name: str) -> dict[str, Any]:
    """The settings of the named preset: full key ("trainer.algorithm.eps_clip_high") -> value.

    Raises:
        UserError: for an unknown name, listing the nearest ones.
    """
    return dict(PRESETS[name].settings)


def _flat(group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


for _name, _bundle in yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
).items():
    PRESETS.register(_name)(Preset(_bundle.pop("source"), dict(_flat(_bundle))))
