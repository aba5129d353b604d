"""Whether a model has routers whose choice can be replayed, from its config.json and transformers' sources.

Invariant: nothing is imported of transformers, which would import torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from skyasync.config.model_files import config_file, read_shape
from skyasync.errors import UserError


def check_routers(way: str, path: str, key: str) -> None:
    """Raises ``UserError`` for a model of which no choice of experts can be replayed.

    Args:
        way: ``trainer.policy.router_replay``.
    """
    file = config_file(path)
    if way == "none" or file is None:
        return
    family = str(read_shape(file, f"{key}={path}").get("model_type"))
    if has_routers(family) is False:
        raise UserError(
            f"trainer.policy.router_replay={way}: {family} ({path}) has no routers that transformers knows of: set "
            f"trainer.policy.router_replay=none"
        )


def has_routers(family: str) -> bool | None:
    """Whether transformers records what a family's routers say; None where its sources do not tell."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "models" / family / f"modeling_{family}.py"
    return '"router_logits": OutputRecorder(' in file.read_text(encoding="utf-8") if file.is_file() else None
