"""Outputs of engines as lists, which compare with == and index tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skyasync.inference.interface import FinishReason, GenerationOutput


@dataclass
class Listed:
    """A ``GenerationOutput``."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None
    error: str = ""


def listed(output: GenerationOutput) -> Listed:
    arrays = (output.token_ids, output.logprobs, output.versions)
    assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32]
    return Listed(
        output.request_id, *(array.tolist() for array in arrays), output.finish_reason, output.error
    )
