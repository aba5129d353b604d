"""AdamW whose state is short: moments of eight bits, or weights and moments in bfloat16 without float32 masters.

Invariant: torch's own AdamW computes each step, in float32, on copies of a few million numbers at a time; only what is
kept between steps is short. One gradient makes the same weights and moments bit for bit on any number of ranks.

    kept ──▶ float32 copies ──▶ torch's AdamW ──▶ kept: codes and scales, or rounded by chance
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from skyasync.workers.blockwise import block_of, decode, encode
from skyasync.workers.limits import STEPPED_AT_ONCE
from skyasync.workers.norms import local
from skyasync.workers.rounding import chances, places, round_by_chance

STEP, FIRST, SECOND, SCALE = "step", "exp_avg", "exp_avg_sq", "_scale"
_PARAMETERS = 1 << 20
"""Steps are told apart by more than a model has parameters."""


class ShortAdamW(torch.optim.AdamW):
    """Parameters in bfloat16 are rounded by chance.

    Args:
        groups, options: as torch's.
        eight_bits: matrices' moments are kept as codes; else moments are kept in the parameter's dtype.
        seed: of the chance.
    """

    def __init__(self, groups: list[dict[str, Any]], *, eight_bits: bool, seed: int, **options: Any) -> None:  # noqa: ANN401
        super().__init__(groups, **options)
        self._eight_bits, self._seed = eight_bits, seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for number, (parameter, group) in enumerate(self._everything()):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                self._begin(parameter, state)
            before = state[STEP].clone()
            state[STEP] += 1
            key = (self._seed * _PARAMETERS + int(before)) * _PARAMETERS + number
            for part in _parts(parameter, state, key):
                _move(part, before.clone(), group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As it is: torch would give all of the state the parameter's dtype."""
        super().load_state_dict(state_dict | {"state": {}})
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, (parameter, _) in zip(numbers, self._everything(), strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])

    def _everything(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        return ((parameter, group) for group in self.param_groups for parameter in group["params"])

    def _begin(self, parameter: Tensor, state: dict[str, Any]) -> None:
        block = block_of(parameter.shape) if self._eight_bits else 0
        state[STEP] = torch.zeros((), device=local(parameter).device)
        for moment in (FIRST, SECOND):
            if block:
                state[moment] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[moment + SCALE] = _scales(parameter, block)
            else:
                state[moment] = torch.zeros_like(parameter, dtype=torch.float32 if self._eight_bits else None)


class _Part:
    """Some rows of a parameter on this rank, of its gradient and of its state; ``chance``: bits per number, or none."""

    def __init__(self, tensors: dict[str, Tensor], chance: list[Tensor]) -> None:
        self.tensors, self.chance = tensors, chance


def _parts(parameter: Tensor, state: dict[str, Tensor], key: int) -> Iterator[_Part]:
    assert parameter.grad is not None
    tensors = {"weight": parameter, "grad": parameter.grad} | {k: v for k, v in state.items() if k != STEP}
    own = {name: _rows(tensor.detach()) for name, tensor in tensors.items()}
    where = places(parameter) if parameter.dtype == torch.bfloat16 else []
    count, row = own["weight"].shape
    step = max(1, STEPPED_AT_ONCE // max(1, row))
    for start in range(0, count if row else 0, step):
        rows = slice(start, start + step)
        chance = chances([where[0][rows], *where[1:]], key) if where else []
        yield _Part({name: tensor[rows] for name, tensor in own.items()}, chance)


def _rows(tensor: Tensor) -> Tensor:
    """This rank's part, ``[rows, row]``; the same memory, but for gradients that lie otherwise."""
    own = local(tensor)
    return own.reshape(len(own), -1) if own.numel() else own.new_empty(0, 0)


def _move(part: _Part, step: Tensor, group: dict[str, Any]) -> None:
    """AdamW's step of these rows."""
    kept = part.tensors
    weight, grad = kept["weight"].float(), kept["grad"].float()
    moments = [
        decode(kept[moment], kept[moment + SCALE], signed=moment == FIRST)
        if moment + SCALE in kept
        else kept[moment].float()
        for moment in (FIRST, SECOND)
    ]
    first, second = group["betas"]
    adamw(
        [weight], [grad], moments[:1], moments[1:], [], [step], fused=True, amsgrad=False, beta1=first, beta2=second,
        lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip
    _keep(kept["weight"], weight, part.chance, 0)
    for number, (moment, values) in enumerate(zip((FIRST, SECOND), moments, strict=True), start=1):
        if moment + SCALE in kept:
            block = values.shape[1] // kept[moment + SCALE].shape[1]
            codes, scales = encode(values, block, signed=moment == FIRST)
            kept[moment].copy_(codes)
            kept[moment + SCALE].copy_(scales)
        else:
            _keep(kept[moment], values, part.chance, number)


def _whole(kept: dict[str, Tensor], moment: str) -> Tensor:
    """In float32; the kept tensor itself if it is that."""
    if moment + SCALE in kept:
        return decode(kept[moment], kept[moment + SCALE], signed=moment == FIRST)
    return kept[moment].float()


def _keep(kept: Tensor, values: Tensor, chance: list[Tensor], number: int) -> None:
    """``values``, in the dtype of ``kept``, which may be the same tensor."""
    if kept.dtype == torch.bfloat16:
        kept.copy_(round_by_chance(values, chance[number]))
    elif kept.data_ptr() != values.data_ptr():
        kept.copy_(values)


def _scales(parameter: Tensor, block: int) -> Tensor:
    """Zeros, ``[rows, blocks in a row]``, on the ranks that have these rows."""
    shape = (parameter.shape[0], parameter.shape[1:].numel() // block)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    own = torch.zeros((len(parameter.to_local()), shape[1]), device=parameter.to_local().device)
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
