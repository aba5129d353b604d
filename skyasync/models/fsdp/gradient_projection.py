"""The cosine of the gradients of consecutive optimizer steps, and a projection that limits it.

If samples are stale, consecutive gradients may repeat one direction, and their steps overshoot. The
idea to measure their cosine and to project aligned gradients is that of GAC (arXiv 2603.01501). The
formula is this library's own. With the gradient g, the previous one p, their cosine c and the limit
L, where c > L:

    g' = g - f p,    f = |g| / |p| * (c - sqrt(1 - c^2) * L / sqrt(1 - L^2))

The component of g that is orthogonal to p stays, and the one along p shrinks until the cosine of g'
and p is L. As both components of g' have the signs of those of g, g' still descends: g' . g >= 0.
At c = 1 nothing of g remains.

Invariant: p is the gradient before projection and clipping, and part of the optimizer's state:
checkpoints have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from skyasync.models import STEPPED_AT_ONCE

PREVIOUS = "previous_gradient"

Pairs = list[tuple[Tensor, Tensor]]
"""This rank's shards of a gradient and of the previous one, by parameter."""


def begin_previous(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401
    """Give parameters without a previous gradient one, in float32 or more, after a step.

    After a first step it is the clipped gradient, which has the same direction.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and PREVIOUS not in optimizer.state[parameter]:
                dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
                optimizer.state[parameter][PREVIOUS] = parameter.grad.to(dtype, copy=True)


def products(pairs: Pairs, device: torch.device) -> Tensor:
    """Compute g . p, g . g and p . p of these shards, float64 ``[3]``."""
    # float64: the projection takes a root of 1 - c², which is small where gradients are aligned.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for gradient, previous in _rows(pairs):
        g = gradient.double().flatten()
        p = previous.double().flatten()
        sums += torch.stack([g.dot(p), g.dot(g), p.dot(p)])
    return sums


def factor_of_previous(cosine: float, limit: float) -> float:
    """The factor f for gradients of norm 1; 0 if the cosine is within the limit."""
    if cosine <= limit:
        return 0.0
    return cosine - math.sqrt(1 - cosine**2) * limit / math.sqrt(1 - limit**2)


def project(pairs: Pairs, factor: float) -> None:
    """Subtract the previous gradient times ``factor``.

    The gradient as it was becomes the previous one.
    """
    for gradient, previous in _rows(pairs):
        measured_gradient = gradient.clone()
        if factor:
            gradient.sub_(previous, alpha=factor)
        previous.copy_(measured_gradient)


def _rows(pairs: Pairs) -> Iterator[tuple[Tensor, Tensor]]:
    """A few million numbers at a time, so that no copy is as large as a gradient."""
    for pair in pairs:
        gradient, previous = torch.atleast_1d(*pair)  # split needs a dimension
        rows = max(1, STEPPED_AT_ONCE // max(1, gradient[:1].numel()))
        yield from zip(gradient.split(rows), previous.split(rows), strict=True)
