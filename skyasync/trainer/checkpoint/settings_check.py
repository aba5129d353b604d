"""The settings that a checkpoint was made with, and whether a run with others may go on from it.

Invariant: what is changed is said, each key in one line, and only what would make the position among the prompts or
the weights wrong is refused: everything else is the user's to change.
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

#: Where a run is, how it shows itself, and what it settles by itself: nothing follows from a change.
_SILENT = frozenset(
    f"trainer.{name}"
    for name in ("resume_mode", "run_name", "runs_dir", "ckpt_path", "terminal", "policy.threads", "critic.threads")
)
#: Of a model's config.json: what decides which tensors there are, and what they mean.
_SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip


def record(cfg: Config) -> dict[str, Any]:
    """What is written into a checkpoint; JSON knows all of it, or its text."""
    return {"config": hidden(asdict(cfg)), "model": _shape(cfg.trainer.policy.model.path)}


def check_recorded(folder: Path, cfg: Config) -> list[str]:
    """What has changed since a checkpoint was made, ``key: old -> new``; nothing if it does not say.

    Raises:
        UserError: for a change that its state cannot follow.
    """
    if not (folder / CONFIG).is_file():
        return []
    made_with = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    before, here = made_with["config"], json.loads(json.dumps(hidden(asdict(cfg)), default=str))
    _refuse(folder, made_with, here)
    return [f"{path}: {old} -> {new}" for path, old, new in _changes(before, here, Keys.of(type(cfg)))]


def _refuse(folder: Path, made_with: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    before, order = made_with["config"], "the prompts would come in another order"
    for key, found, recorded, why in (
        ("trainer.seed", _at(here, "trainer.seed"), _at(before, "trainer.seed"), order),
        ("environment.domains (proportions)", _proportions(here), _proportions(before), order),
        *_other_stream(before, here, order),
        *_other_model(made_with["model"], here),
        *_other_adapters(before, here),
    ):
        if found != recorded:
            raise UserError(
                f"{key}={written(found)}, but checkpoint {folder} was made with {written(recorded)}: {why}; resume "
                f"with the recorded value, or set trainer.resume_mode=none to start anew"
            )


def _other_stream(
    before: Mapping[str, Any], here: Mapping[str, Any], order: str
) -> Iterator[tuple[str, Any, Any, str]]:
    old, new = (_at(config, "data.streaming", False) for config in (before, here))
    yield "data.streaming", new, old, order
    if old:
        size = "data.shuffle_buffer"
        yield size, _at(here, size), _at(before, size), order


def _other_model(before: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    path = str(_at(here, MODEL, ""))
    now = _shape(path)
    for name in before.keys() & now.keys():
        yield f"{name} of {MODEL} ({path})", now[name], before[name], "its weights do not fit into this model"


def _other_adapters(before: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    rank = f"{ADAPTERS}.rank"
    old, new = (_at(config, rank, 0) for config in (before, here))
    yield rank, new, old, "it holds adapters of that rank (of rank 0: whole weights)"
    if old:
        alpha = f"{ADAPTERS}.alpha"
        yield alpha, _at(here, alpha), _at(before, alpha), "its adapters would weigh otherwise"


def _shape(path: str) -> dict[str, Any]:
    """Empty for a model that is no local folder: the tensors' own shapes are compared when they are loaded."""
    file = Path(path) / MODEL_CONFIG
    if not path or not file.is_file():
        return {}
    values = read_shape(file, f"{MODEL}={path}")
    return {name: values[name] for name in _SHAPE if values.get(name) is not None}


def _changes(before: Mapping[str, Any], here: Mapping[str, Any], keys: Keys) -> Iterator[tuple[str, str, str]]:
    for key in keys:
        if key.path in _SILENT:
            continue
        old, new = _at(before, key.path, key.default), _at(here, key.path, key.default)
        if old == new:
            continue
        if key.is_mapping and isinstance(old, Mapping) and isinstance(new, Mapping):
            for name in sorted({*old, *new}):
                if old.get(name) != new.get(name):
                    yield f"{key.path}.{name}", _said(old, name), _said(new, name)
        else:
            yield key.path, written(old), written(new)


def _said(entries: Mapping[str, Any], name: str) -> str:
    return written(entries[name]) if name in entries else "(not set)"


def _proportions(config: Mapping[str, Any]) -> dict[str, Any]:
    domains = _at(config, "environment.domains", {})
    if not isinstance(domains, Mapping):
        return {}
    return {name: entry["proportion"] for name, entry in domains.items() if entry and entry.get("proportion")}


def _at(config: object, path: str, default: object = None) -> object:
    for part in path.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return default
        config = config[part]
    return config
