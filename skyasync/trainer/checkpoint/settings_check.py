"""The settings that a checkpoint was made with, and whether a run with others may resume from it.

Invariant: changes are reported, one line for each key, and only what would make the position among
the prompts or the weights wrong is an error: everything else is the user's to change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

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

#: Where a run is, what it shows, and what it sets automatically: a change has no effect on the results.
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
#: Of a model's config.json: what decides which tensors there are, and what they mean.
_SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_ORDER = "the prompts would come in another order"

Values = Mapping[str, Any]


def record(cfg: Config) -> dict[str, Any]:
    """The record of the settings and the model for a checkpoint, in types of JSON or that have a
    text."""
    return {"config": hidden(asdict(cfg)), "model": _shape(cfg.trainer.policy.model.path)}


def check_recorded(folder: Path, cfg: Config) -> list[str]:
    """The settings that have changed since a checkpoint was made, ``key: old -> new``; none if it
    has no record.

    Raises:
        UserError: for a change that its state cannot follow.
    """
    if not (folder / CONFIG).is_file():
        return []
    recorded = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    before = recorded["config"]
    here = json.loads(json.dumps(hidden(asdict(cfg)), default=str))
    for key, now, then, why in _required(before, recorded["model"], here):
        if now != then:
            raise UserError(
                f"{key}={written(now)}, but checkpoint {folder} was made with {written(then)}: {why}; resume "
                f"with the recorded value, or set trainer.resume_mode=none to start from scratch"
            )
    changes = []
    for entry in Keys.of(type(cfg)):
        old = _at(before, entry.path, entry.default)
        new = _at(here, entry.path, entry.default)
        if entry.path in _SILENT or old == new:
            continue
        if entry.is_mapping and isinstance(old, Mapping) and isinstance(new, Mapping):
            for name in sorted({*old, *new}):
                if old.get(name) != new.get(name):
                    then, now = (
                        written(side[name]) if name in side else "(not set)" for side in (old, new)
                    )
                    changes.append(f"{entry.path}.{name}: {then} -> {now}")
        else:
            changes.append(f"{entry.path}: {written(old)} -> {written(new)}")
    return changes


def _required(before: Values, model: Values, here: Values) -> Iterator[tuple[str, Any, Any, str]]:
    """Keys, their values in this run and in the checkpoint, and why they must be equal."""

    def both(key: str, default: object = None) -> tuple[Any, Any]:
        return _at(here, key, default), _at(before, key, default)

    yield "trainer.seed", *both("trainer.seed"), _ORDER
    yield "environment.domains (proportions)", _proportions(here), _proportions(before), _ORDER
    yield "data.streaming", *both("data.streaming", False), _ORDER
    if _at(before, "data.streaming", False):
        yield "data.shuffle_buffer", *both("data.shuffle_buffer"), _ORDER
    yield "data.sampler", *both("data.sampler", "uniform"), _ORDER
    yield FREEZE, *both(FREEZE, []), "its optimizer has no state of other weights"
    path = str(_at(here, MODEL, ""))
    shape = _shape(path)
    for name in model.keys() & shape.keys():
        yield (
            f"{name} of {MODEL} ({path})",
            shape[name],
            model[name],
            "its weights do not fit into this model",
        )
    rank = f"{ADAPTERS}.rank"
    alpha = f"{ADAPTERS}.alpha"
    yield rank, *both(rank, 0), "it holds adapters of that rank (of rank 0: whole weights)"
    if _at(before, rank, 0):
        yield alpha, *both(alpha), "its adapters have another scale"


def _shape(path: str) -> dict[str, Any]:
    """Empty for a model that is no local folder: the tensors' own shapes are compared when they are
    loaded."""
    file = Path(path) / MODEL_CONFIG
    if not path or not file.is_file():
        return {}
    values = read_shape(file, f"{MODEL}={path}")
    return {name: values[name] for name in _SHAPE if values.get(name) is not None}


def _proportions(config: Values) -> dict[str, Any]:
    domains = _at(config, "environment.domains", {})
    if not isinstance(domains, Mapping):
        return {}
    return {
        name: entry["proportion"]
        for name, entry in domains.items()
        if entry and entry.get("proportion")
    }


def _at(config: object, path: str, default: object = None) -> object:
    for part in path.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return default
        config = config[part]
    return config
