"""What one rank of a model needs: bytes by what takes them, in each phase of its work. Nothing
imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Lines = dict[str, int]
"""Bytes by what takes them."""

WEIGHTS = "weights"
ADAPTERS = "adapters"
OPTIMIZER_STATE = "moments"
GRADIENTS = "gradients"
GATHERED = "gathered"
ACTIVATIONS = "activations"
LOGITS = "logits"
LINES = (WEIGHTS, ADAPTERS, OPTIMIZER_STATE, GRADIENTS, GATHERED, ACTIVATIONS, LOGITS)

OFFLOADED: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": (OPTIMIZER_STATE,),
    "parameters": (WEIGHTS, ADAPTERS, OPTIMIZER_STATE, GRADIENTS),
}
"""What ``cpu_offload`` keeps in host memory."""


@dataclass(frozen=True)
class RankUse:
    """What one rank needs.

    Args:
        resident: between two calls.
        scoring, updating, stepping, publishing: at the fullest moment of a log-probability pass, an
            update, its optimizer step alone, and of a weight sync.
        host: what ``cpu_offload`` keeps in host memory instead.
        gradients: bytes of a shard's, from the backward pass to the step.
        learnt: bytes of the trained weights and their optimizer state: what a checkpoint holds.
        tokens: of its largest micro-batch.
        micro_batches: per optimizer step.
        flops: floating-point operations of an update.
        sent: bytes of an update by kind of collective.
        checkpointing: the backward pass recomputes activations.
    """

    resident: Lines
    scoring: Lines
    updating: Lines = field(default_factory=dict)
    stepping: Lines = field(default_factory=dict)
    publishing: Lines = field(default_factory=dict)
    host: Lines = field(default_factory=dict)
    gradients: int = 0
    learnt: int = 0
    tokens: int = 0
    micro_batches: int = 0
    flops: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)
    checkpointing: bool = False

    @property
    def resident_bytes(self) -> int:
        """Bytes between two calls, on the device and in host memory."""
        gradients = self.host.get(GRADIENTS, 0)
        return sum(self.resident.values()) + sum(self.host.values()) - gradients

    def offloaded(self, kind: str) -> RankUse:
        """The use with ``cpu_offload`` on a GPU: what waits in host memory is not on the device."""
        lines_on_host = OFFLOADED[kind]
        host = {line: size for line, size in self.resident.items() if line in lines_on_host}
        if GRADIENTS in lines_on_host and self.learnt:
            host[GRADIENTS] = self.gradients

        def on_device(lines: Lines) -> Lines:
            return {line: size for line, size in lines.items() if line not in lines_on_host}

        updating = on_device(self.updating)
        stepping = on_device(self.stepping)
        if kind == "optimizer":  # it comes to the device for the step
            stepping = self.stepping
            updating = max(updating, stepping, key=lambda lines: sum(lines.values()))
        return replace(
            self,
            resident=on_device(self.resident),
            scoring=on_device(self.scoring),
            updating=updating,
            stepping=stepping,
            publishing=on_device(self.publishing),
            host=host,
        )
