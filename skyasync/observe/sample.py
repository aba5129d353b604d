"""A trajectory in short, for those who look on.

Invariant: plain data of bounded size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

SAMPLE_CHARS = 2000  # of a prompt and of a response: no terminal shows more


@dataclass
class Sample:
    """A trajectory in short."""

    step: int
    prompt: str
    response: str
    reward: float

    @classmethod
    def of(cls, step: int, record: Mapping[str, Any]) -> Sample:
        """From a record of ``samples.jsonl``."""
        prompt, response = (str(record[name])[:SAMPLE_CHARS] for name in ("prompt", "response"))
        return cls(step, prompt, response, nan if record["reward"] is None else float(record["reward"]))
