"""What vLLM says of a run's engines, asked in a process of its own: tensors that it takes, weights,
KV cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 300.0
SHOWN = 3  # names
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class VLLMReport:
    """Of one engine; without ``weights`` vLLM was not asked, or could not answer.

    Args:
        unknown: why it could not.
        refused: tensors of a weight sync that vLLM does not take, and why.
        missing: parameters of vLLM that no tensor fills, or only in part.
        weights, cache, least_cache: bytes of a worker: its tensors, its KV cache, one sequence of
            full length.
        tokens, sequences: that fit in the cache, the latter of full length.
    """

    unknown: str = ""
    tensors: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    devices: int = 1
    weights: int = 0
    cache: int = 0
    least_cache: int = 0
    tokens: int = 0
    sequences: float = 0.0

    @property
    def problem(self) -> str:
        """Why weights would not arrive; "" if they do."""
        problems = [f"vLLM does not take {name} ({why})" for name, why in self.refused.items()]
        problems += [
            f"no tensor fills vLLM's {name}, or only a part of it" for name in self.missing
        ]
        return "; ".join(problems[:SHOWN]) + (
            f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        )


NO_REPORT = VLLMReport()


def ask_vllm(request: Mapping[str, Any], devices: int, limit_s: float = LIMIT_S) -> VLLMReport:
    """A request has the arguments of ``skyasync.planning.vllm_model.examine``."""
    program = [sys.executable, "-m", "skyasync.planning.vllm_model"]
    env = os.environ | ENVIRONMENT
    try:
        ended = subprocess.run(
            program,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=env,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return VLLMReport(f"vLLM has not answered within {limit_s:.0f} s")
    if ended.returncode:
        return VLLMReport(f"vLLM's process failed: {ended.stderr.strip().rpartition(chr(10))[2]}")
    return VLLMReport(**json.loads(ended.stdout.rpartition("\n")[2]), devices=devices)
