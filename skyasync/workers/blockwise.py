"""Moments of eight bits: a code per number, and a scale per block (Dettmers et al. 2022, arXiv 2110.02861).

Invariant: a block lies within a row of the whole tensor, so whichever ranks hold which rows, codes and scales are the
same, and a checkpoint's are read by any number of ranks. (The libraries' blocks run through a rank's shard.)
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LARGEST = 256
"""Numbers in a block at most, as in the paper's libraries."""
LEAST = 16
"""Smaller blocks would save little."""
_SMALLEST_SCALE = 1e-12


def block_of(shape: torch.Size) -> int:
    """Numbers in a block: the largest divisor of a row's size that is no larger than 256; 0: it stays as it is."""
    if len(shape) < 2:
        return 0
    row = shape[1:].numel()
    block = max((size for size in range(1, min(row, LARGEST) + 1) if row % size == 0), default=0)
    return block if block >= LEAST else 0


@cache
def code_book(signed: bool, device: torch.device) -> Tensor:
    """``[256]``, rising: what each code stands for, of a block's largest number.

    Seven decades, each with twice as many values as the one below it: the paper's dynamic tree.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**exponent + 1, dtype=torch.float64)
        decade = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [*decade.tolist(), *((-decade).tolist() if signed else ())]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _borders(signed: bool, device: torch.device) -> Tensor:
    book = code_book(signed, device)
    return (book[1:] + book[:-1]) / 2


def encode(values: Tensor, block: int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes, uint8 ``[rows, row]``, and scales ``[rows, row / block]`` of float32 ``values`` ``[rows, row]``.

    Without sign, what is not 0 gets no code of 0: a step is divided by the root of it.
    """
    blocks = values.view(len(values), -1, block)
    scales = blocks.abs().amax(-1).clamp_(min=_SMALLEST_SCALE)
    codes = torch.bucketize(blocks / scales[..., None], _borders(signed, values.device), out_int32=True)
    if not signed:
        codes.clamp_(min=1).mul_(blocks > 0)
    return codes.to(torch.uint8).view(values.shape), scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Float32 values of what ``encode`` gave."""
    values = code_book(signed, codes.device)[codes.int()]
    return values.view(*scales.shape, -1).mul_(scales[..., None]).view(codes.shape)
