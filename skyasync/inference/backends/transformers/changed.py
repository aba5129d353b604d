"""Changes of weights, put into the model that the embedded engine computes with.

Invariant: after ``take`` the model holds, bit for bit, what a whole file of the same weights would have left in it.
Where it holds them as they are sent, changes are written over its own; where its dtype is another, a copy of what was
sent is kept, the changes go there, and all of it is loaded.
"""

from __future__ import annotations

from skyasync.inference.backends.transformers.model import EmbeddedModel
from skyasync.weight_sync.changed_weights import About, KeptWeights, put_changes
from skyasync.weight_sync.digests import digest, refuse
from skyasync.weight_sync.shared_memory import read_digests, read_weights


class ChangedInPlace:
    """Between the files that arrive and the model, in the engine's thread."""

    def __init__(self, model: EmbeddedModel) -> None:
        self._model = model
        self._kept: KeptWeights | None = None  # where it holds them in another dtype

    def take(self, path: str, about: About) -> bool:
        """Take a file of changes, or a whole one that must be kept; False leaves it to be loaded as ever.

        Raises:
            WeightSyncError: if the model does not hold what was sent afterwards.
        """
        if about.keep:
            held = self._model.tensors()
            alike = all(tensor.dtype == held[name].dtype for name, tensor in read_weights(path).items() if name in held)
            self._kept = None if alike else KeptWeights()
        elif not about.base:
            return False
        if self._kept is not None:
            weights, digests = self._kept.read(path)
            self._model.load_weights(weights)
            self._model.check_held(weights, digests)
            return True
        if about.base:
            self._write_over(path)
        return bool(about.base)

    def _write_over(self, path: str) -> None:
        held = self._model.tensors()
        put_changes(path, held)
        wrong = [name for name, sent in read_digests(path).items() if digest(held[name]) != sent]
        refuse(wrong, "the transformers engine holds")
