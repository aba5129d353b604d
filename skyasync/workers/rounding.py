"""Numbers rounded to bfloat16 up or down by chance, so that on average nothing is lost of steps too small for it.

Invariant: the chance of a number depends on its place in the whole tensor, the step and the seed, and on nothing else:
replicas stay alike, a resumed run draws the same, and so does any other number of ranks. Libraries draw from each
rank's own generator, of which none of this is true.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_WORD = 0xFFFF


def places(parameter: Tensor) -> list[Tensor]:
    """Of this rank's part: per dimension, what an index there adds to a number's place in the whole tensor."""
    sizes, offsets = tuple(parameter.shape), (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    found, stride = [], 1
    for size, offset, whole in zip(reversed(sizes), reversed(offsets), reversed(parameter.shape), strict=True):
        found.append((torch.arange(size, device=parameter.device) + offset) * stride)
        stride *= whole
    return found[::-1]


def chances(where: list[Tensor], key: int) -> list[Tensor]:
    """Three numbers of 16 random bits for each place, int32, ``[rows, row]`` of what ``where`` spans.

    They are a hash of place and key (the finalizer of SplitMix64, Steele et al. 2014).
    """
    begin = Random(key).getrandbits(64)  # keys that are neighbours are far apart
    bits = torch.full((1,) * len(where), _signed(begin), dtype=torch.int64, device=where[0].device)
    for dimension, index in enumerate(where):
        bits = bits + index.view([-1 if d == dimension else 1 for d in range(len(where))])
    bits.mul_(_signed(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    bits = bits.view(len(where[0]), -1)
    return [((bits >> shift) & _WORD).int() for shift in (0, 16, 32)]


def round_by_chance(values: Tensor, chance: Tensor) -> Tensor:
    """bfloat16 of float32 ``values``; ``chance``: int32 below 2**16, one each. What bfloat16 can say stays as it is."""
    return (values.view(torch.int32) + chance).bitwise_and_(~_WORD).view(torch.float32).bfloat16()


def _signed(number: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
