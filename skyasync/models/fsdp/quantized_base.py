"""Low-precision frozen weights (QLoRA, arXiv 2305.14314): sharded and gathered as codes, computed
with as numbers.

Invariant: what is computed with, sent to engines and exported is the same: the numbers that the
codes stand for. Blocks are parts of rows and shards are whole rows, so the codes are the same on
any number of ranks. FSDP2 gathers the codes and dequantizes them, a layer at a time (its
``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``); any other operation on such a weight takes
its numbers.

NF4 is bitsandbytes' own, in blocks of 64 or 32 with a float32 scale each; int8 is a row's largest
magnitude over 127.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from skyasync.errors import MissingExtraError, UserError
from skyasync.heap import give_back

KEY = "trainer.policy.lora.base_dtype"
BLOCKS = {"nf4": (64, 32)}
"""Numbers that share a scale: the first of these that divides a row; for other kinds a row is one
block."""

SCALE = 4  # bytes of one
ON_A_CPU = 1 << 14
"""Numbers that are quantized at once."""

_aten: Any = torch.ops.aten


class QuantizedRows(torch.Tensor):
    """Rows of a weight, each as codes followed by scales; shape and dtype are those of the numbers.

    Args:
        packed: uint8 ``[rows, bytes]``: one tensor, since FSDP2 on one rank gathers one of a
            parameter.
        about: of a row: nf4 or int8, and how many numbers it is.
        size, dtype: of the numbers.
    """

    packed: Tensor
    about: tuple[str, int]

    @staticmethod
    def __new__(
        cls: type[QuantizedRows],
        packed: Tensor,
        about: tuple[str, int],
        size: Sequence[int],
        dtype: torch.dtype,
    ) -> QuantizedRows:
        rows: QuantizedRows = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=packed.device
        )
        rows.packed = packed
        rows.about = about
        return rows

    def __init__(self, *args: object) -> None: ...

    @classmethod
    def of(cls, weight: Tensor, kind: str) -> QuantizedRows:
        """A matrix, or whole rows of one."""
        return cls(
            _encode(weight.detach(), kind), (kind, weight.shape[1]), weight.shape, weight.dtype
        )

    def numbers(self) -> Tensor:
        return _decode(self.packed, self.about, self.dtype).view(self.shape)

    def untyped_storage(self) -> torch.UntypedStorage:
        """FSDP compares it to recognize its own memory."""
        return self.packed.untyped_storage()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        first = args[0]
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
            return cls(func(first.packed), first.about, first.shape, first.dtype)
        if func is _aten.view.default:
            size = func(torch.empty(first.shape, device="meta"), args[1]).shape
            return cls(first.packed, first.about, size, first.dtype)
        if func is _aten._to_copy.default and kwargs.get("dtype") in (None, first.dtype):
            return cls(first.packed.to(kwargs.get("device")), first.about, first.shape, first.dtype)
        args, kwargs = tree_map(
            lambda value: value.numbers() if isinstance(value, cls) else value, (args, kwargs)
        )
        return func(*args, **kwargs)

    # ---------------------------------------------------------------- FSDP2

    def fsdp_pre_all_gather(self, mesh: object) -> tuple[tuple[Tensor, ...], tuple[str, int]]:
        return (self.packed,), self.about

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        about: tuple[str, int],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        whole = _decode(gathered[0], about, dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


def quantize_base(model: PreTrainedModel, kind: str) -> None:
    """Quantize a sharded model's frozen matrices: of its linear layers, but for the head.

    Raises:
        UserError: if there is none, or one whose rows cannot be divided.
    """
    homes = {
        id(p): layer
        for layer in model.modules()
        if isinstance(layer, FSDPModule)
        for p in layer.parameters()
    }
    for name, weight in _matrices(model, kind):
        assert isinstance(weight, DTensor)
        if weight.to_local().shape[0] * weight.device_mesh.size(-1) != weight.shape[0]:
            raise UserError(
                f"{KEY}={kind}: {name} has {weight.shape[0]} rows, which {weight.device_mesh.size(-1)} ranks cannot "
                f"share evenly: choose a divisor (trainer.policy.fsdp_size), or leave the key empty"
            )
        weight._local_tensor = QuantizedRows.of(weight.to_local(), kind)
        home = homes.get(id(weight))
        if home:
            home._apply(lambda tensor: tensor)  # FSDP registers the codes and frees the numbers
            give_back()


def round_to_quantized(model: PreTrainedModel, kind: str) -> None:
    """Replace a plain model's matrices by their numbers after ``quantize_base``."""
    for _, weight in _matrices(model, kind):
        weight.data = QuantizedRows.of(weight.data, kind).numbers()


def _matrices(model: PreTrainedModel, kind: str) -> Iterator[tuple[str, nn.Parameter]]:
    head = model.get_output_embeddings()
    any_matrix = False
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is head or module.weight.requires_grad:
            continue
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if _block(weight.shape[1], kind):
            any_matrix = True
            yield name, weight
    if not any_matrix:
        raise UserError(
            f"{KEY}={kind}: {type(model).__name__} has no linear layer whose rows are blocks of "
            f"{' or '.join(map(str, BLOCKS.get(kind, ()))) or 'any length'}: leave the key empty"
        )


def _block(width: int, kind: str) -> int:
    """Numbers in a block of a row; 0: rows of this length cannot be divided."""
    return next((block for block in BLOCKS.get(kind, (width,)) if width % block == 0), 0)


def _encode(weight: Tensor, kind: str) -> Tensor:
    """Uint8 ``[rows, bytes]``, some rows at a time on a CPU: bitsandbytes needs 200 bytes per
    number there."""
    packed: list[Tensor] = []
    if weight.device.type == "cpu":
        at_once = max(1, ON_A_CPU // max(1, weight.shape[1]))
    else:
        at_once = max(1, len(weight))
    for rows in weight.split(at_once):
        if kind == "int8":
            scales = (rows.float().abs().amax(1, keepdim=True) / 127).clamp(
                min=torch.finfo(torch.float32).tiny
            )
            codes = (rows.float() / scales).round().to(torch.int8)
        else:
            block = _block(rows.shape[1], kind)
            codes, state = _library().quantize_4bit(
                rows.contiguous(), blocksize=block, quant_type=kind
            )
            scales = state.absmax
        parts = [
            part.contiguous().view(rows.shape[0], -1).view(torch.uint8) for part in (codes, scales)
        ]
        packed.append(torch.cat(parts, 1))
    return torch.cat(packed)


def _decode(packed: Tensor, about: tuple[str, int], dtype: torch.dtype) -> Tensor:
    """``[rows, width]`` of ``[rows, bytes]``."""
    (rows, length), (kind, width) = packed.shape, about
    if kind == "int8":
        codes, scales = packed.split([length - SCALE, SCALE], 1)
        return (codes.view(torch.int8).float() * scales.contiguous().view(torch.float32)).to(dtype)
    library = _library()
    codes, scales = packed.split([width // 2, length - width // 2], 1)
    state = library.QuantState(
        absmax=scales.contiguous().view(torch.float32).flatten(),
        shape=torch.Size((rows, width)),
        code=library.get_4bit_type(kind, device=packed.device),
        blocksize=_block(width, kind),
        quant_type=kind,
        dtype=dtype,
    )
    numbers: Tensor = library.dequantize_4bit(codes.reshape(-1, 1), state)
    return numbers


def _library() -> Any:  # noqa: ANN401
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise MissingExtraError("bitsandbytes", "quant") from error
    return bitsandbytes.functional
