"""What a run wrote, for the page: its first, a middle and its last samples, token by token where they are recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

COLUMNS = 3  # steps side by side
FULL_GAP = 1.0  # nats at which the colour is full
NEGLIGIBLE = 1e-3  # nats: rounding


@dataclass(frozen=True)
class Token:
    """``version`` is the number of a colour, -1 for text of the environment; ``gap`` is trainer minus engine."""

    text: str
    version: int
    gap: float | None
    says: str
    engine: float | None = None
    trainer: float | None = None

    @property
    def strength(self) -> float:
        """Of the colour of the gap, from 0 to 1; its root, so that small ones are seen too."""
        if self.gap is None or abs(self.gap) < NEGLIGIBLE:
            return 0.0
        return round(min(1.0, math.sqrt(abs(self.gap) / FULL_GAP)), 2)


@dataclass(frozen=True)
class PageSample:
    name: str
    prompt: str
    response: str
    label: str  # the right answer; "" if the row has none
    reward: float
    stop_reason: str
    versions: list[int]
    tokens: list[Token]
    gap: float | None  # the largest

    @property
    def ended(self) -> str:
        return {"stop": "ended", "length": "cut by length"}.get(self.stop_reason, self.stop_reason)


@dataclass(frozen=True)
class Step:
    number: int
    samples: list[PageSample]


def chosen(rows: Sequence[Row], columns: int = COLUMNS, *, newest: bool = False) -> list[Step]:
    """The samples of the first, the last, and steps evenly between; or of the newest steps, the last one first."""
    steps = sorted({row["step"] for row in rows})
    if not steps:
        return []
    if newest:
        shown = steps[: -columns - 1 : -1]
    else:
        shown = sorted({steps[round(n * (len(steps) - 1) / max(columns - 1, 1))] for n in range(columns)})
    return [Step(step, [sample(row) for row in rows if row["step"] == step]) for step in shown]


def sample(row: Row) -> PageSample:
    """The sample of a row of ``samples.jsonl``."""
    columns = row.get("tokens") or {}
    texts, versions = columns.get("text") or [], columns.get("versions") or []
    engine = columns.get("logprobs") or [None] * len(texts)
    trainer = columns.get("trainer_logprobs") or [None] * len(texts)
    tokens = []
    for text, version, theirs, ours in zip(texts, versions, engine, trainer, strict=False):
        staleness = row["step"] - 1 - version
        words = [f"version {version}" + (f", {staleness} old" if staleness > 0 else "")]
        words += [f"engine {theirs:.3f}"] if theirs is not None else []
        words += [f"trainer {ours:.3f}"] if ours is not None else []
        gap = ours - theirs if ours is not None and theirs is not None else None
        title = "from the environment" if version < 0 else " · ".join(words)
        tokens.append(Token(text, version, gap, title, theirs, ours))
    return PageSample(
        name=str(row.get("prompt_id", "")),
        prompt=str(row.get("prompt", "")),
        response=str(row.get("response", "")),
        label="" if row.get("label") is None else str(row["label"]),
        reward=math.nan if row.get("reward") is None else float(row["reward"]),
        stop_reason=str(row.get("stop_reason", "")),
        versions=list(row.get("versions") or []),
        tokens=tokens,
        gap=max((abs(token.gap) for token in tokens if token.gap is not None), default=None),
    )
