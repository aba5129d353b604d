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
#: Settings that say where a run is, not what it does.
_LOCATIONS = {"trainer.run_name", "trainer.runs_dir", "trainer.terminal"}
_RESOLVED = {"trainer.resume_mode"}  # the program sets it if the user does not


@dataclass(frozen=True)
class Setting:
    """A setting of one or several runs, as text."""

    key: str
    values: list[str]  # as one would write them, of each run
    default: str  # "" for a key that the user has added
    doc: str = ""
    origin: str = ""  # who has set it, "" if unknown


def read(config: Path) -> Values:
    """A run's ``config.yaml`` by dotted key; empty if it cannot be read."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader  # in C: far faster
    try:
        tree = yaml.load(config.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, yaml.YAMLError):
        return {}
    if not isinstance(tree, Mapping):
        return {}
    keys = Keys.of(Config)
    # A setting whose value is a mapping is one key.
    return dict(dotted(tree, lambda path, group: path not in keys))


def read_origins(file: Path) -> dict[str, str]:
    """Key -> who has set it; empty if it cannot be read."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def changed(values: Values, origins: Mapping[str, str]) -> list[Setting]:
    """The keys that differ from their defaults, in the schema's order, and keys that the user added.

    The recipe's are at the end.
    """
    keys = Keys.of(Config)
    settings = []
    for key in keys:
        if key.path not in values or not _is_choice(key.path, values, origins):
            continue
        value = values[key.path]
        if value != key.default:
            origin = _origin(key.path, origins)
            default = written(key.default)
            settings.append(
                Setting(
                    key.path,
                    [written(value)],
                    default=default,
                    doc=key.doc,
                    origin=origin,
                )
            )
    for path, value in values.items():
        if path not in keys:
            settings.append(
                Setting(
                    path,
                    [written(value)],
                    "",
                    origin=_origin(path, origins),
                )
            )
    return sorted(settings, key=lambda setting: setting.origin == RECIPE)


def _is_choice(path: str, values: Values, origins: Mapping[str, str]) -> bool:
    """Whether a setting is a choice: no location of the run, and no value that another implies."""
    if path in _LOCATIONS:
        return False
    if path in _RESOLVED and not _origin(path, origins):
        return False
    # The model of another role is the policy's by default.
    is_model = path.endswith(".model.path") and path != MODEL
    return not (is_model and values[path] == values.get(MODEL))


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """Who has set a key; the entries of a mapping may have been set in several places."""
    distinct: dict[str, None] = {}  # a set in the order of the entries
    for name, origin in origins.items():
        if name == path or name.startswith(f"{path}."):
            distinct[origin] = None
    return ", ".join(distinct)


def differing(runs: list[Values]) -> list[Setting]:
    """The keys in which the runs differ from each other."""
    keys = Keys.of(Config)
    paths = dict.fromkeys(keys.by_path)
    for values in runs:
        paths |= dict.fromkeys(values)
    settings = []
    for path in paths:
        if path in _LOCATIONS:
            continue
        texts = [written(values[path]) if path in values else "(not set)" for values in runs]
        if len(set(texts)) < 2:
            continue
        if path in keys:
            key = keys[path]
            settings.append(
                Setting(
                    path,
                    texts,
                    written(key.default),
                    key.doc,
                )
            )
        else:
            settings.append(Setting(path, texts, ""))
    return settings
