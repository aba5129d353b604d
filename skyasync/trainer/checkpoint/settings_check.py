"""The settings that a checkpoint was made with, and whether a run with others may resume from it.

Invariant: changes are reported, one line for each key, and only what would make the position among
the prompts or the weights wrong is an error: everything else is the user's to change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from skyasync.config.keys import Keys
from skyasync.config.model_files import CONFIG as MODEL_CONFIG
from skyasync.config.model_files import read_shape
from skyasync.config.schema import Config
from skyasync.config.secrets import hidden
from skyasync.config.values import written
from skyasync.errors import UserError
from skyasync.trainer.checkpoint.checkpoints import CONFIG

MODEL = "trainer.policy.model.path"
ADAPTERS = "trainer.policy.lora"
FREEZE = "trainer.policy.freeze"

#: Folders, output and automatic settings of a run: a change has no effect on the results.
_SILENT = frozenset(
    f"trainer.{name}"
    for name in (
        "resume_mode",
        "run_name",
        "runs_dir",
        "ckpt_path",
        "terminal",
        "policy.threads",
        "critic.threads",
    )
)
#: Keys of a model's config.json that decide which tensors there are, and what they mean.
_SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_ORDER = "the prompts would come in another order"

Values = Mapping[str, Any]


class FixedSetting(NamedTuple):
    """A setting that a resumed run must not change, in this run and in the checkpoint."""

    key: str
    current: object
    saved: object
    reason: str


def record(cfg: Config) -> dict[str, Any]:
    """The settings and the model's shape, for a checkpoint; values are written as JSON or text."""
    return {"config": hidden(asdict(cfg)), "model": _shape(cfg.trainer.policy.model.path)}


def check_recorded(folder: Path, cfg: Config) -> list[str]:
    """The settings that have changed since a checkpoint was made, ``key: old -> new``.

    A checkpoint without a record has no changes.

    Raises:
        UserError: for a change that its state cannot follow.
    """
    if not (folder / CONFIG).is_file():
        return []
    recorded = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    saved = recorded["config"]
    # As JSON, like the recorded settings: tuples become lists.
    current = json.loads(json.dumps(hidden(asdict(cfg)), default=str))
    for key, new, old, reason in _fixed_settings(saved, recorded["model"], current):
        if new != old:
            raise UserError(
                f"{key}={written(new)}, but checkpoint {folder} was made with {written(old)}: {reason}; "
                f"resume with the recorded value, or set trainer.resume_mode=none to start from scratch"
            )
    changes = []
    for entry in Keys.of(type(cfg)):
        old = _at(saved, entry.path, entry.default)
        new = _at(current, entry.path, entry.default)
        if entry.path in _SILENT or old == new:
            continue
        if entry.is_mapping and isinstance(old, Mapping) and isinstance(new, Mapping):
            for name in sorted({*old, *new}):
                if old.get(name) != new.get(name):
                    change = f"{_entry_text(old, name)} -> {_entry_text(new, name)}"
                    changes.append(f"{entry.path}.{name}: {change}")
        else:
            changes.append(f"{entry.path}: {written(old)} -> {written(new)}")
    return changes


def _entry_text(mapping: Values, name: str) -> str:
    return written(mapping[name]) if name in mapping else "(not set)"


def _fixed_settings(saved: Values, model: Values, current: Values) -> Iterator[FixedSetting]:
    def setting(key: str, reason: str, default: object = None) -> FixedSetting:
        return FixedSetting(key, _at(current, key, default), _at(saved, key, default), reason)

    yield setting("trainer.seed", _ORDER)
    yield FixedSetting(
        "environment.domains (proportions)", _proportions(current), _proportions(saved), _ORDER
    )
    yield setting("data.streaming", _ORDER, False)
    if _at(saved, "data.streaming", False):  # other data is shuffled by the seed
        yield setting("data.shuffle_buffer", _ORDER)
    yield setting("data.sampler", _ORDER, "uniform")
    yield setting(FREEZE, "its optimizer has no state of other weights", [])
    path = str(_at(current, MODEL, ""))
    shape = _shape(path)
    for name in model.keys() & shape.keys():
        key = f"{name} of {MODEL} ({path})"
        yield FixedSetting(key, shape[name], model[name], "its weights do not fit into this model")
    rank = f"{ADAPTERS}.rank"
    yield setting(rank, "it holds adapters of that rank (of rank 0: whole weights)", 0)
    if _at(saved, rank, 0):
        yield setting(f"{ADAPTERS}.alpha", "its adapters have another scale")


def _shape(path: str) -> dict[str, Any]:
    """The shape of a model by its configuration file.

    Empty if the model is no local folder: its tensors are compared when they are loaded.
    """
    file = Path(path) / MODEL_CONFIG
    if not path or not file.is_file():
        return {}
    values = read_shape(file, f"{MODEL}={path}")
    return {name: values[name] for name in _SHAPE if values.get(name) is not None}


def _proportions(config: Values) -> dict[str, Any]:
    domains = _at(config, "environment.domains", {})
    proportions: dict[str, Any] = {}
    if isinstance(domains, Mapping):
        for name, entry in domains.items():
            if entry and entry.get("proportion"):
                proportions[name] = entry["proportion"]
    return proportions


def _at(config: object, path: str, default: object = None) -> object:
    """The value of a dotted key."""
    for name in path.split("."):
        if not isinstance(config, Mapping) or name not in config:
            return default
        config = config[name]
    return config
