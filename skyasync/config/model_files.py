"""The folder of a model: where it is, and what its JSON files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyasync.errors import UserError
from skyasync.registry import resolve_reference

CONFIG = "config.json"


def model_path(path: str, key: str = "trainer.policy.model.path") -> str:
    """A local folder's absolute path, a hub name as it is, or what ``module:function`` makes.

    Raises:
        UserError: if no model is named, or a local path has none.
    """
    if not path:
        raise UserError(
            f"{key} is empty: name a Hugging Face model, a local folder, or module:function"
        )
    if ":" in path and not Path(path).exists():
        return str(resolve_reference(path, kind=key)())
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{key}={path!r} is a folder without config.json")
        return str(folder.resolve())
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise UserError(
            f"{key}={path!r} is neither a local folder nor a Hugging Face name (owner/name)"
        )
    return path


def config_file(model: str) -> Path | None:
    """A model's configuration, in its folder or in the hub's cache; None where this machine has
    neither."""
    file = Path(model).expanduser() / CONFIG
    if file.is_file() or model.count("/") != 1:
        if file.is_file():
            return file
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, CONFIG)
    except HFValidationError:  # no hub's name: a folder that is not there
        return None
    if isinstance(cached, str):
        return Path(cached)
    return None


def read_json(file: Path, purpose: str) -> dict[str, Any]:
    """The settings in a file.

    Args:
        what: the key and value that led here.

    Raises:
        UserError: if it cannot be read, or holds something else.
    """
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{purpose}: its {file.name} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{purpose}: its {file.name} has no settings")
    return settings


def read_shape(file: Path, purpose: str) -> dict[str, Any]:
    """As ``read_json``, for a model's configuration, with the settings of its language model at the
    top level."""
    shape = read_json(file, purpose)
    return {**shape, **(shape.get("text_config") or {})}
