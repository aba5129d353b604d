"""A run's settings for the page: what differs from the defaults, or between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from skyasync.config.keys import Keys
from skyasync.config.load import RECIPE
from skyasync.config.schema import Config
from skyasync.config.values import dotted, written

Values = dict[str, Any]
MODEL = "trainer.policy.model.path"
_WHERE = {
    "trainer.run_name",
    "trainer.runs_dir",
    "trainer.terminal",
}  # where a run is, not what it does
_SETTLED = {"trainer.resume_mode"}  # settings that the program resolves if they are not given


@dataclass(frozen=True)
class Setting:
    """``values`` as one would write them, of each run; ``default`` is "" for a key of the user's
    own.

    ``origin`` is who has set it, "" where that is not known.
    """

    key: str
    values: list[str]
    default: str
    doc: str = ""
    origin: str = ""


def read(config: Path) -> Values:
    """A run's ``config.yaml`` by dotted key; empty where it cannot be read."""
    try:
        if yaml.__with_libyaml__:
            loader = yaml.CSafeLoader
        else:
            loader = yaml.SafeLoader
        whole = yaml.load(config.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, yaml.YAMLError):
        return {}
    keys = Keys.of(Config)
    if isinstance(whole, Mapping):
        return dict(dotted(whole, lambda path, group: path not in keys))
    return {}


def read_origins(file: Path) -> dict[str, str]:
    """Key -> who has set it; empty where it cannot be read."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def changed(values: Values, origins: Mapping[str, str]) -> list[Setting]:
    """The keys that differ from their defaults, in the schema's order; keys of the user's own; then
    the recipe's."""
    keys = Keys.of(Config)
    model = values.get(MODEL)

    def is_users(path: str) -> bool:
        """Not the run's location, nor a model that defaults to the policy's."""
        is_model = path.endswith(".model.path") and path != MODEL
        settled = path in _SETTLED and not _origin(path, origins)
        return path not in _WHERE and not settled and not (is_model and values[path] == model)

    differ = [
        Setting(
            key.path,
            [written(values[key.path])],
            written(key.default),
            key.doc,
            _origin(key.path, origins),
        )
        for key in keys
        if key.path in values and values[key.path] != key.default and is_users(key.path)
    ] + [
        Setting(path, [written(value)], "", origin=_origin(path, origins))
        for path, value in values.items()
        if path not in keys
    ]
    return sorted(differ, key=lambda setting: setting.origin == RECIPE)


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """Who has set a key; the entries of a mapping may have been set in several places."""
    mine = (
        origin for name, origin in origins.items() if name == path or name.startswith(f"{path}.")
    )
    return ", ".join(dict.fromkeys(mine))


def differing(runs: list[Values]) -> list[Setting]:
    """The keys in which the runs differ from each other."""
    keys = Keys.of(Config)
    paths = dict.fromkeys([*keys.by_path, *(path for values in runs for path in values)])
    settings = []
    for path in paths:
        values_of = [written(values[path]) if path in values else "(not set)" for values in runs]
        if len(set(values_of)) > 1 and path not in _WHERE:
            default, doc = (
                (written(keys[path].default), keys[path].doc) if path in keys else ("", "")
            )
            settings.append(Setting(path, values_of, default, doc))
    return settings
