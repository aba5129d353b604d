"""Adapters, added to the frozen weights in the model that the embedded engine computes with.

Invariant: after ``take`` every weight under an adapter is the frozen one with the newest adapter added, every other one
is what the files held, and both are proven by digests. The frozen weights under adapters are kept beside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyasync.inference.backends.transformers.model import EmbeddedModel
from skyasync.weight_sync.adapter_file import Adapter, base_mark, read_adapter, with_added
from skyasync.weight_sync.digests import digest, digests_of, refuse
from skyasync.weight_sync.update import WeightSyncError


class AdaptedInPlace:
    """Between the files that arrive and the model, in the engine's thread."""

    def __init__(self, model: EmbeddedModel) -> None:
        self._model = model
        self._frozen: dict[str, Tensor] = {}  # of layers under adapters, before anything was added
        self._digests: dict[str, str] = {}  # of all weights, before

    def take(self, path: str) -> None:
        """Raises WeightSyncError if the model does not hold afterwards what it should."""
        adapter, held = read_adapter(path), self._model.tensors()
        if not self._digests:
            self._begin(adapter, held)
        expected = dict(self._digests)
        with torch.no_grad():
            for layer, halves in adapter.layers().items():
                name, frozen = f"{layer}.weight", self._frozen[f"{layer}.weight"]
                here = (halves[0].to(frozen.device), halves[1].to(frozen.device))
                merged = with_added(frozen, here, adapter.scale, transposed=layer in adapter.transposed)
                expected[name] = digest(merged)
                held[name].copy_(merged)
        refuse([name for name in expected if digest(held[name]) != expected[name]], "the transformers engine holds")
        lost = [name for name, frozen in self._frozen.items() if digest(frozen) != self._digests[name]]
        refuse(lost, "the transformers engine keeps")

    def _begin(self, adapter: Adapter, held: dict[str, Tensor]) -> None:
        """Keep what adapters are added to, which must be what the trainer adds them to."""
        self._digests = digests_of(held)
        own = {name: self._digests[name] for name in self._model.own_names()}
        dtype = adapter.base.partition(" ")[0]
        if dtype == str(self._model.dtype) and adapter.base != base_mark(self._model.dtype, own):
            self._digests = {}
            raise WeightSyncError(
                "the frozen weights of the transformers engine are not those of the trainer, whose adapters it was "
                "sent (trainer.policy.lora.sync=adapter)"
            )
        self._frozen = {f"{layer}.weight": held[f"{layer}.weight"].clone() for layer in adapter.layers()}
