"""The frozen model that a KL term compares with.

Invariant: its weights never change; it only answers ``logprobs``.
"""

from __future__ import annotations

from typing import ClassVar

from skyasync.workers.base import ModelWorker


class ReferenceWorker(ModelWorker):
    """One rank of the reference: ``trainer.ref.model``, or the policy's starting weights where that has no path."""

    role_name: ClassVar[str] = "reference"
