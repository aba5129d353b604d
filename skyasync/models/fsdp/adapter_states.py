"""Several sets of adapters on one frozen model, of which one is in the model at a time.

Invariant: a set that comes back is bitwise what it was, with its gradient, its optimizer state and its count of steps.
So what is computed with it is what would be computed if the others were not there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from skyasync.models.backend import MODEL, Totals
from skyasync.models.fsdp.sharding import local

if TYPE_CHECKING:
    from skyasync.models.fsdp.backend import FSDPBackend


@dataclass
class AdapterState:
    """This rank's part of a set, in the order of the parameters that are trained."""

    weights: list[Tensor]
    gradients: list[Tensor | None]
    optimizer: list[dict[str, Any]]
    totals: Totals
    step: int


def exchange(backend: FSDPBackend, state: AdapterState | None) -> AdapterState:
    """Take a set out of the model, and put ``state`` there.

    Args:
        state: None leaves the weights, without gradient and optimizer state.
    """
    part, steps = backend.trained[MODEL], backend.optimizer.state
    parameters = [p for p in backend.model.parameters() if p.requires_grad]
    taken = AdapterState(
        [local(p.detach()).clone() for p in parameters],
        [p.grad for p in parameters],
        [steps.pop(p, {}) for p in parameters],
        part.totals,
        backend.step,
    )
    backend.drop_gradient()
    backend.step = 0
    if state is not None:
        rows = zip(parameters, state.weights, state.gradients, state.optimizer, strict=True)
        for parameter, weight, gradient, own in rows:
            local(parameter.detach()).copy_(weight)
            parameter.grad = gradient
            if own:
                steps[parameter] = own
        part.totals, backend.step = state.totals, state.step
    return taken


@contextmanager
def without_optimizer_state(backend: FSDPBackend) -> Iterator[None]:
    """Meanwhile a checkpoint holds the weights alone."""
    state, backend.optimizer.state = backend.optimizer.state, defaultdict(dict)
    try:
        yield
    finally:
        backend.optimizer.state = state
