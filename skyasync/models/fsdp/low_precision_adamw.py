"""AdamW with a low-precision state: moments of eight bits, or bfloat16 weights and moments without
master weights.

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
            before = state[STEP].clone()
            state[STEP] += 1
            key = (self._seed * _PARAMETERS + int(before)) * _PARAMETERS + number
            tensors = {"weight": parameter, "grad": parameter.grad} | {
                k: v for k, v in state.items() if k != STEP
            }
            # ``[rows, row]`` of this rank; the same memory, but for gradients that are not
            # contiguous.
            shards = {name: local(tensor.detach()) for name, tensor in tensors.items()}
            own = {
                n: t.reshape(len(t), -1) if t.numel() else t.new_empty(0, 0)
                for n, t in shards.items()
            }
            if parameter.dtype == torch.bfloat16:
                index = linear_indices(parameter)
            else:
                index = []
            count, row = own["weight"].shape
            at_once = max(1, STEPPED_AT_ONCE // max(1, row))
            for start in range(0, count if row else 0, at_once):
                rows = slice(start, start + at_once)
                if index:
                    bits = random_bits([index[0][rows], *index[1:]], key)
                else:
                    bits = []
                _step_rows(
                    {name: tensor[rows] for name, tensor in own.items()},
                    bits,
                    before.clone(),
                    group,
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Without a conversion: torch would give all of the state the parameter's dtype."""
        super().load_state_dict(state_dict | {"state": {}})
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])

    def _begin(self, parameter: Tensor, state: dict[str, Any]) -> None:
        block = block_of(parameter.shape) if self._eight_bits else 0
        state[STEP] = torch.zeros((), device=local(parameter).device)
        for moment in (FIRST, SECOND):
            if not block:
                state[moment] = torch.zeros_like(
                    parameter, dtype=torch.float32 if self._eight_bits else None
                )
                continue
            state[moment] = torch.zeros_like(parameter, dtype=torch.uint8)
            blocks = parameter.shape[1:].numel() // block
            scales = torch.zeros((len(local(parameter)), blocks), device=local(parameter).device)
            if isinstance(parameter, DTensor):
                scales = DTensor.from_local(
                    scales,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=torch.Size((parameter.shape[0], blocks)),
                    stride=(blocks, 1),
                )
            state[moment + SCALE] = scales


def _step_rows(
    tensors: dict[str, Tensor], bits: list[Tensor], step: Tensor, group: dict[str, Any]
) -> None:
    """AdamW's step of some rows of a parameter, of its gradient and of its state.

    Args:
        bits: 16 random bits per number, for the weight and each moment; none if nothing is rounded.
    """
    weight = tensors["weight"].float()
    grad = tensors["grad"].float()
    averages = [
        decode(tensors[moment], tensors[moment + SCALE], signed=moment == FIRST)
        if moment + SCALE in tensors
        else tensors[moment].float()
        for moment in (FIRST, SECOND)
    ]
    first, second = group["betas"]
    adamw(
        [weight],
        [grad],
        averages[:1],
        averages[1:],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=first,
        beta2=second,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for number, (name, values) in enumerate(
        zip(("weight", FIRST, SECOND), (weight, *averages), strict=True)
    ):
        stored = tensors[name]
        if name + SCALE in tensors:
            block = values.shape[1] // tensors[name + SCALE].shape[1]
            codes, scales = encode(values, block, signed=name == FIRST)
            stored.copy_(codes)
            tensors[name + SCALE].copy_(scales)
        elif stored.dtype == torch.bfloat16:
            stored.copy_(round_stochastically(values, bits[number]))
        elif stored.data_ptr() != values.data_ptr():
            stored.copy_(values)


LARGEST = 256
"""Numbers in a block at most, as in the paper's libraries."""
LEAST = 16
"""Smaller blocks would save little."""
_SMALLEST_SCALE = 1e-12


def block_of(shape: torch.Size) -> int:
    """Numbers in a block: the largest divisor of a row's size that is at most 256; 0: the tensor is
    not encoded."""
    if len(shape) < 2:
        return 0
    row = shape[1:].numel()
    block = max((size for size in range(1, min(row, LARGEST) + 1) if row % size == 0), default=0)
    if block >= LEAST:
        return block
    return 0


@cache
def codebook(signed: bool, device: torch.device) -> Tensor:
    """``[256]``, ascending: the value of each code, as a share of a block's largest number.

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
    values = codebook(signed, device)
    return (values[1:] + values[:-1]) / 2


def encode(values: Tensor, block: int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes, uint8 ``[rows, row]``, and scales ``[rows, row / block]`` of float32 ``values``
    ``[rows, row]``.

    Unsigned values other than 0 never get the code of 0: a step is divided by their root.
    """
    blocks = values.view(len(values), -1, block)
    scales = blocks.abs().amax(-1).clamp_(min=_SMALLEST_SCALE)
    codes = torch.bucketize(
        blocks / scales[..., None], _borders(signed, values.device), out_int32=True
    )
    if not signed:
        codes.clamp_(min=1).mul_(blocks > 0)
    return codes.to(torch.uint8).view(values.shape), scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Float32 values of what ``encode`` gave."""
    values = codebook(signed, codes.device)[codes.int()]
    return values.view(*scales.shape, -1).mul_(scales[..., None]).view(codes.shape)


_WORD = 0xFFFF


def linear_indices(parameter: Tensor) -> list[Tensor]:
    """Of this rank's shard: per dimension, what an index there adds to a number's flat index in the
    whole tensor."""
    sizes = tuple(parameter.shape)
    offsets = (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    indices = []
    stride = 1
    for size, offset, whole in zip(
        reversed(sizes), reversed(offsets), reversed(parameter.shape), strict=True
    ):
        indices.append((torch.arange(size, device=parameter.device) + offset) * stride)
        stride *= whole
    return indices[::-1]


def random_bits(indices: list[Tensor], key: int) -> list[Tensor]:
    """Three numbers of 16 random bits for each flat index, int32, ``[rows, row]``, of the
    ``linear_indices``.

    They are a hash of index and key (the finalizer of SplitMix64, Steele et al. 2014).
    """
    begin = Random(key).getrandbits(64)  # of neighbouring keys they are far apart
    bits = torch.full(
        (1,) * len(indices), _signed(begin), dtype=torch.int64, device=indices[0].device
    )
    for dimension, index in enumerate(indices):
        bits = bits + index.view([-1 if d == dimension else 1 for d in range(len(indices))])
    bits.mul_(_signed(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(
            _signed(factor)
        )
    bits = bits.view(len(indices[0]), -1)
    return [((bits >> shift) & _WORD).int() for shift in (0, 16, 32)]


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """bfloat16 of float32 ``values``; ``bits``: int32 below 2**16, one each. Values of bfloat16
    stay as they are."""
    return (values.view(torch.int32) + bits).bitwise_and_(~_WORD).view(torch.float32).bfloat16()


def _signed(number: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    number &= (1 << 64) - 1
    if number >> 63:
        return number - (1 << 64)
    return number
