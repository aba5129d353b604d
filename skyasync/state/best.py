"""Which checkpoint is the best by a metric: ``best.json`` beside the checkpoints.

Invariant: the best one is never removed for being old; a run that goes on knows what there is to beat.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "best.json"


@dataclass(frozen=True)
class Best:
    """The best checkpoint so far: the name of its folder, and the metric that it has."""

    folder: str
    metric: str
    value: float


def read_best(checkpoints: Path) -> Best | None:
    """None if there is none, or its folder is gone."""
    try:
        values = json.loads((checkpoints / NAME).read_text(encoding="utf-8"))
        best = Best(str(values["folder"]), str(values["metric"]), float(values["value"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return best if (checkpoints / best.folder).is_dir() else None


def write_best(checkpoints: Path, best: Best) -> None:
    scratch = checkpoints / f"{NAME}.tmp"
    scratch.write_text(json.dumps(asdict(best)) + "\n", encoding="utf-8")
    os.replace(scratch, checkpoints / NAME)
