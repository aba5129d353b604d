"""Weight updates, applied to the model that the embedded engine computes with.

Invariant: after ``apply`` the model is bitwise identical to one that has loaded all weights from one file, and digests
prove it if they were sent. A delta is written over the model's own weights if they have the dtype that was sent. Else
the weights are kept in that dtype too: the delta goes there, and all of them are loaded. Adapters are added to copies
of the frozen weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyasync.inference.backends.transformers.model import EmbeddedModel
from skyasync.weight_sync.adapters import Adapter, frozen_weights_id, with_added
from skyasync.weight_sync.delta import DeltaDecoder, ReceivedWeights, put_changes
from skyasync.weight_sync.update import WeightSyncError
from skyasync.weight_sync.verify.digests import digest, digests_of, holds, refuse


class WeightUpdater:
    """In the engine's thread."""

    def __init__(self, model: EmbeddedModel) -> None:
        self._model = model
        self._decoder: DeltaDecoder | None = None  # for deltas, if the model has another dtype
        self.adapters = AdapterMerger(model)

    def apply(self, received: ReceivedWeights) -> None:
        """Raises WeightSyncError if the model does not have what was sent afterwards."""
        about, weights = received.about, received.weights
        if about.adapter:
            self.adapters.apply(Adapter.decode(received))
            return
        if about.keep:
            own = self._model.tensors()
            alike = all(tensor.dtype == own[name].dtype for name, tensor in weights.items() if name in own)
            self._decoder = None if alike else DeltaDecoder()
        if self._decoder is not None and (about.base or about.keep):
            weights = self._decoder.decode(weights, received.digests, about)
        elif about.base:
            own = self._model.tensors()
            put_changes(weights, own)
            wrong = [name for name, sent in received.digests.items() if digest(own[name]) != sent]
            refuse(wrong, "the transformers engine holds")
            return
        self._model.load_weights(weights, adopt=received.stays)
        own = self._model.tensors()
        wrong = []
        for name, sent in received.digests.items():
            if not received.in_place(name, own[name]) and not holds(own[name], weights[name], sent):
                wrong.append(name)
        refuse(wrong, "the transformers engine holds")


class AdapterMerger:
    """Adds the newest adapter to the frozen weights under it; every other weight is what the files had."""

    def __init__(self, model: EmbeddedModel) -> None:
        self._model = model
        self._frozen: dict[str, Tensor] = {}  # of layers under adapters, before anything was added
        self._digests: dict[str, str] = {}  # of all weights, before

    def apply(self, adapter: Adapter) -> None:
        own = self._model.tensors()
        if not self._digests:
            digests = digests_of(own)
            mark = frozen_weights_id(self._model.dtype, {name: digests[name] for name in self._model.own_names()})
            if adapter.base.partition(" ")[0] == str(self._model.dtype) and adapter.base != mark:
                raise WeightSyncError(
                    "the frozen weights of the transformers engine are not those of the trainer, whose adapters it was "
                    "sent (trainer.policy.lora.sync=adapter)"
                )
            self._digests = digests
            self._frozen = {f"{layer}.weight": own[f"{layer}.weight"].clone() for layer in adapter.layers()}
        expected = dict(self._digests)
        with torch.no_grad():
            for layer, halves in adapter.layers().items():
                name, frozen = f"{layer}.weight", self._frozen[f"{layer}.weight"]
                here = (halves[0].to(frozen.device), halves[1].to(frozen.device))
                merged = with_added(frozen, here, adapter.scale, transposed=layer in adapter.transposed)
                expected[name] = digest(merged)
                own[name].copy_(merged)
        refuse([name for name in expected if digest(own[name]) != expected[name]], "the transformers engine holds")
        changed = [name for name, frozen in self._frozen.items() if digest(frozen) != self._digests[name]]
        refuse(changed, "the transformers engine keeps")
