"""The JSON files of a model's folder: where they are, and what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyasync.errors import UserError

CONFIG = "config.json"


def config_file(model: str) -> Path | None:
    """A model's configuration, in its folder or in the hub's cache; None where this machine has neither."""
    file = Path(model).expanduser() / CONFIG
    if file.is_file() or model.count("/") != 1:
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, CONFIG)
    except HFValidationError:  # no hub's name: a folder that is not there
        return None
    return Path(cached) if isinstance(cached, str) else None


def read_json(file: Path, what: str) -> dict[str, Any]:
    """The settings in a file.

    Args:
        what: the key and value that led here.

    Raises:
        UserError: if it cannot be read, or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: its {file.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{what}: its {file.name} holds no settings")
    return found


def read_shape(file: Path, what: str) -> dict[str, Any]:
    """As ``read_json``, of a model's configuration: the language model's part of it lies with the rest."""
    shape = read_json(file, what)
    return {**shape, **(shape.get("text_config") or {})}
