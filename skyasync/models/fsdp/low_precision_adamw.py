"""AdamW with a low-precision state: moments of eight bits, or bfloat16 without master weights.

Invariant: torch's own AdamW computes each step, in float32, on copies of a few million numbers at a
time. One gradient gives bitwise the same weights and moments on any number of ranks, and in a
resumed run. A block of codes (Dettmers et al. 2022, arXiv 2110.02861) is a part of a row of the
whole tensor. The random bits of a number depend only on its index in the whole tensor, the step and
the seed. torchao and bitsandbytes divide a rank's shard into blocks and draw from each rank's own
generator, and torchao's state is a tensor subclass that safetensors cannot write.

    state ──▶ float32 copies ──▶ torch's AdamW ──▶ state: codes and scales, or stochastically
    rounded
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw

from skyasync.models import STEPPED_AT_ONCE
from skyasync.models.fsdp.sharding import local

# torch's names of AdamW's state, and the end of a name of this module's scales.
STEP = "step"
FIRST = "exp_avg"
SECOND = "exp_avg_sq"
SCALE = "_scale"
_PARAMETERS = 1 << 20
"""More than the parameters of a model, so that keys of different steps differ."""


class LowPrecisionAdamW(torch.optim.AdamW):
    """Parameters in bfloat16 are rounded stochastically.

    Args:
        groups, options: as torch's.
        eight_bits: matrices' moments are stored as codes; else all moments in the parameter's
            dtype.
        seed: of the rounding.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        eight_bits: bool,
        seed: int,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(groups, **options)
        self._eight_bits = eight_bits
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        pairs = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for number, (parameter, group) in enumerate(pairs):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                self._begin(parameter, state)
            previous_step = state[STEP].clone()
            state[STEP] += 1
            key = (self._seed * _PARAMETERS + int(previous_step)) * _PARAMETERS + number
            matrices = {  # [rows, row] of this rank
                "weight": _matrix(parameter),
                "grad": _matrix(parameter.grad),
            }
            for name, tensor in state.items():
                if name != STEP:
                    matrices[name] = _matrix(tensor)
            indices = []
            if parameter.dtype == torch.bfloat16:
                indices = linear_indices(parameter)
            count, row = matrices["weight"].shape
            at_once = max(1, STEPPED_AT_ONCE // max(1, row))
            if row == 0:
                count = 0
            for start in range(0, count, at_once):
                rows = slice(start, start + at_once)
                bits = []
                if indices:
                    bits = random_bits([indices[0][rows], *indices[1:]], key)
                slices = {name: matrix[rows] for name, matrix in matrices.items()}
                # A copy: AdamW counts the step up, in place, in each call.
                _step_rows(slices, bits, previous_step.clone(), group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load without a conversion: torch would give all of the state the parameter's dtype."""
        super().load_state_dict(state_dict | {"state": {}})
        for saved_group, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for number, parameter in zip(saved_group["params"], group["params"], strict=True):
                if number in state_dict["state"]:
                    self.state[parameter] = dict(state_dict["state"][number])

    def _begin(self, parameter: Tensor, state: dict[str, Any]) -> None:
        block = block_of(parameter.shape) if self._eight_bits else 0
        shard = local(parameter)
        state[STEP] = torch.zeros((), device=shard.device)
        for moment in (FIRST, SECOND):
            if not block:
                # Vectors are few: their moments stay exact next to those of eight bits.
                dtype = torch.float32 if self._eight_bits else None
                state[moment] = torch.zeros_like(parameter, dtype=dtype)
                continue
            # Scales of 0 make the first moments 0, whatever the codes of 0 stand for.
            state[moment] = torch.zeros_like(parameter, dtype=torch.uint8)
            blocks = parameter.shape[1:].numel() // block
            scales = torch.zeros((len(shard), blocks), device=shard.device)
            if isinstance(parameter, DTensor):
                # Sharded like the parameter, so that checkpoints store it by the same offsets.
                scales = DTensor.from_local(
                    scales,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=torch.Size((parameter.shape[0], blocks)),
                    stride=(blocks, 1),
                )
            state[moment + SCALE] = scales


def _matrix(tensor: Tensor) -> Tensor:
    """This rank's rows, ``[rows, row]``: the same memory, except of a gradient with gaps."""
    shard = local(tensor.detach())
    if shard.numel() == 0:
        return shard.new_empty(0, 0)  # reshape cannot infer a size of an empty shard
    return shard.reshape(len(shard), -1)


def _step_rows(
    tensors: dict[str, Tensor],
    bits: list[Tensor],
    step: Tensor,
    group: dict[str, Any],
) -> None:
    """Run AdamW's step on some rows of a parameter, of its gradient and of its state.

    Args:
        bits: 16 random bits per number, for the weight and each moment; none if nothing is rounded.
    """
    numbers = {"weight": tensors["weight"].float()}  # [rows, row] each, float32
    for moment in (FIRST, SECOND):
        if moment + SCALE in tensors:
            numbers[moment] = decode(
                tensors[moment], tensors[moment + SCALE], signed=moment == FIRST
            )
        else:
            numbers[moment] = tensors[moment].float()
    beta1, beta2 = group["betas"]
    # Changes weight and moments in place. The empty list is for amsgrad's maxima.
    adamw(
        [numbers["weight"]],
        [tensors["grad"].float()],
        [numbers[FIRST]],
        [numbers[SECOND]],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for number, (name, values) in enumerate(numbers.items()):
        target = tensors[name]
        if name + SCALE in tensors:
            stored_scales = tensors[name + SCALE]  # [rows, blocks]
            block = values.shape[1] // stored_scales.shape[1]
            codes, scales = encode(values, block, signed=name == FIRST)
            target.copy_(codes)
            stored_scales.copy_(scales)
        elif target.dtype == torch.bfloat16:
            target.copy_(round_stochastically(values, bits[number]))
        elif target.data_ptr() != values.data_ptr():  # float() of float32 is no copy
            target.copy_(values)


LARGEST = 256
"""Numbers in a block at most, as in the paper's libraries."""
SMALLEST_BLOCK = 16
"""Numbers in a block at least; a smaller one would save little, as its scale takes 32 bits."""
_SMALLEST_SCALE = 1e-12  # a block of zeros would divide by 0


def block_of(shape: torch.Size) -> int:
    """Count the numbers in a block; 0: the tensor is not encoded.

    It is the largest divisor of a row's size that is at most ``LARGEST``.
    """
    if len(shape) < 2:
        return 0
    row = shape[1:].numel()
    for block in range(min(row, LARGEST), SMALLEST_BLOCK - 1, -1):
        if row % block == 0:
            return block
    return 0


@cache
def codebook(signed: bool, device: torch.device) -> Tensor:
    """The value of each code, ``[256]``, ascending, as a share of a block's largest number.

    Seven decades, each with twice as many values as the one below it: the paper's dynamic tree.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        # With a sign the other half of the values are the negative ones.
        count = 2**exponent if signed else 2 * 2**exponent
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        decade = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += decade.tolist()
        if signed:
            values += (-decade).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _borders(signed: bool, device: torch.device) -> Tensor:
    """``[255]``: the middle between neighbouring values, so that a number gets the nearest."""
    values = codebook(signed, device)
    return (values[1:] + values[:-1]) / 2


def encode(values: Tensor, block: int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Encode float32 ``values`` ``[rows, row]``.

    Unsigned values other than 0 never get the code of 0: a step is divided by their root.

    Returns:
        Codes, uint8 ``[rows, row]``, and scales ``[rows, row / block]``.
    """
    blocks = values.view(len(values), -1, block)  # [rows, row / block, block]
    scales = blocks.abs().amax(-1).clamp_(min=_SMALLEST_SCALE)
    shares = blocks / scales[..., None]
    codes = torch.bucketize(shares, _borders(signed, values.device), out_int32=True)
    if not signed:
        codes.clamp_(min=1).mul_(blocks > 0)
    return codes.to(torch.uint8).view(values.shape), scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Float32 values ``[rows, row]`` of codes and scales from ``encode``."""
    values = codebook(signed, codes.device)[codes.int()]  # [rows, row]
    blocks = values.view(*scales.shape, -1)
    return blocks.mul_(scales[..., None]).view(codes.shape)


_WORD = 0xFFFF  # the 16 bits of a float32 that bfloat16 lacks


def linear_indices(parameter: Tensor) -> list[Tensor]:
    """Flat indices of this rank's numbers in the whole tensor, by dimension.

    Each tensor has what an index of its dimension adds to the flat index.
    """
    sizes = tuple(parameter.shape)
    offsets = (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    indices: list[Tensor] = []
    stride = 1
    for dimension in range(parameter.dim() - 1, -1, -1):  # the last one varies fastest
        index = torch.arange(sizes[dimension], device=parameter.device) + offsets[dimension]
        indices.insert(0, index * stride)
        stride *= parameter.shape[dimension]
    return indices


def random_bits(indices: list[Tensor], key: int) -> list[Tensor]:
    """Three numbers of 16 random bits for each number of the ``linear_indices``.

    They are a hash of index and key (the finalizer of SplitMix64, Steele et al. 2014), int32,
    ``[rows, row]`` each.
    """
    begin = Random(key).getrandbits(64)  # of neighbouring keys they are far apart
    dimensions = len(indices)
    device = indices[0].device
    bits = torch.full((1,) * dimensions, _signed(begin), dtype=torch.int64, device=device)
    for dimension, index in enumerate(indices):
        shape = [1] * dimensions
        shape[dimension] = -1
        bits = bits + index.view(shape)  # broadcast: the sum is the flat index
    bits.mul_(_signed(0x9E3779B97F4A7C15))  # SplitMix64's step; int64 wraps around
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # torch shifts arithmetically: the mask clears the copies of the sign.
        shifted_bits = (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        bits.bitwise_xor_(shifted_bits).mul_(_signed(factor))
    bits = bits.view(len(indices[0]), -1)  # [rows, row]
    return [((bits >> shift) & _WORD).int() for shift in (0, 16, 32)]


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 ``values`` to bfloat16; those of bfloat16 stay as they are.

    Args:
        bits: int32 below 2**16, one for each value.
    """
    # Random bits below the mantissa that stays carry into it as often as the rest is large.
    sums = values.view(torch.int32) + bits
    return sums.bitwise_and_(~_WORD).view(torch.float32).bfloat16()


def _signed(number: int) -> int:
    """The same 64 bits as a number of int64, which torch takes."""
    number &= (1 << 64) - 1
    if number >> 63:
        return number - (1 << 64)
    return number
