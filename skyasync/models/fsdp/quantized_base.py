"""Low-precision frozen weights (QLoRA, arXiv 2305.14314): sharded as codes, computed as numbers.

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
"""Numbers that share a scale: the first of these that divides a row.

For other formats a row is one block.
"""

ON_A_CPU = 1 << 14
"""Numbers that are quantized at once on a CPU: bitsandbytes needs 200 bytes for each."""

_aten: Any = torch.ops.aten


class QuantizedRows(torch.Tensor):
    """Rows of a weight, each as codes followed by scales; shape and dtype are those of the numbers.

    Args:
        packed: uint8 ``[rows, bytes]``: one tensor, since FSDP2 on one rank gathers one of a
            parameter.
        row_format: nf4 or int8, and how many numbers it is.
        size, dtype: of the numbers.
    """

    packed: Tensor
    row_format: tuple[str, int]

    @staticmethod
    def __new__(
        cls: type[QuantizedRows],
        packed: Tensor,
        row_format: tuple[str, int],
        size: Sequence[int],
        dtype: torch.dtype,
    ) -> QuantizedRows:
        rows: QuantizedRows = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=packed.device
        )
        rows.packed = packed
        rows.row_format = row_format
        return rows

    def __init__(self, *args: object) -> None: ...

    @classmethod
    def of(cls, weight: Tensor, kind: str) -> QuantizedRows:
        """Quantize a matrix, or whole rows of one, ``[rows, width]``."""
        packed = _encode(weight.detach(), kind)  # [rows, bytes]
        return cls(packed, (kind, weight.shape[1]), weight.shape, weight.dtype)

    def numbers(self) -> Tensor:
        return _decode(self.packed, self.row_format, self.dtype).view(self.shape)

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
        rows = args[0]
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
            return cls(func(rows.packed), rows.row_format, rows.shape, rows.dtype)
        if func is _aten.view.default:
            # The meta device resolves sizes such as -1 without memory.
            size = func(torch.empty(rows.shape, device="meta"), args[1]).shape
            return cls(rows.packed, rows.row_format, size, rows.dtype)
        if func is _aten._to_copy.default and kwargs.get("dtype") in (None, rows.dtype):
            packed = rows.packed.to(kwargs.get("device"))
            return cls(packed, rows.row_format, rows.shape, rows.dtype)

        def numbers(value: object) -> object:
            return value.numbers() if isinstance(value, cls) else value

        args, kwargs = tree_map(numbers, (args, kwargs))
        return func(*args, **kwargs)

    # ---------------------------------------------------------------- FSDP2

    def fsdp_pre_all_gather(self, mesh: object) -> tuple[tuple[Tensor, ...], tuple[str, int]]:
        return (self.packed,), self.row_format

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        row_format: tuple[str, int],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        numbers = _decode(gathered[0], row_format, dtype)
        if out is None:
            return numbers, (numbers,)
        # The backward pass gathers into the same memory again, which autograd has saved: a new
        # version would be an error there, although the values are the same.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(numbers)
        return None


def quantize_base(model: PreTrainedModel, kind: str) -> None:
    """Quantize a sharded model's frozen matrices: of its linear layers, but for the head.

    Raises:
        UserError: if there is none, or one whose rows cannot be divided.
    """
    fsdp_modules: dict[int, nn.Module] = {}  # the innermost one, by id of a parameter
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for parameter in module.parameters():
                fsdp_modules[id(parameter)] = module
    for name, weight in _matrices(model, kind):
        assert isinstance(weight, DTensor)
        rows = weight.shape[0]
        ranks = weight.device_mesh.size(-1)
        shard = weight.to_local()
        if shard.shape[0] * ranks != rows:
            raise UserError(
                f"{KEY}={kind}: {name} has {rows} rows, which {ranks} ranks cannot "
                f"share evenly: choose a divisor (trainer.policy.fsdp_size), or leave the key empty"
            )
        weight._local_tensor = QuantizedRows.of(shard, kind)
        fsdp_module = fsdp_modules.get(id(weight))
        if fsdp_module:
            # FSDP registers the codes and frees the numbers, layer by layer: all numbers at once
            # may not fit.
            fsdp_module._apply(lambda tensor: tensor)
            give_back()


def round_to_quantized(model: PreTrainedModel, kind: str) -> None:
    """Replace a plain model's matrices by the numbers that ``quantize_base`` would leave."""
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
        sizes = " or ".join(map(str, BLOCKS.get(kind, ("any length",))))
        raise UserError(
            f"{KEY}={kind}: {type(model).__name__} has no linear layer whose rows are blocks of "
            f"{sizes}: leave the key empty"
        )


def _block(width: int, kind: str) -> int:
    """Count the numbers in a block of a row; 0: rows of this length cannot be divided."""
    for block in BLOCKS.get(kind, (width,)):
        if width % block == 0:
            return block
    return 0


def _encode(weight: Tensor, kind: str) -> Tensor:
    """Encode ``[rows, width]`` as uint8 ``[rows, bytes]``, some rows at a time on a CPU."""
    chunks = []
    if weight.device.type == "cpu":
        at_once = max(1, ON_A_CPU // max(1, weight.shape[1]))
    else:
        at_once = max(1, len(weight))
    for rows in weight.split(at_once):
        if kind == "int8":
            numbers = rows.float()
            largest = numbers.abs().amax(1, keepdim=True)  # [rows, 1]
            # A row of zeros would divide by 0.
            scales = (largest / 127).clamp(min=torch.finfo(torch.float32).tiny)
            codes = (numbers / scales).round().to(torch.int8)
        else:
            codes, state = _library().quantize_4bit(
                rows.contiguous(), blocksize=_block(rows.shape[1], kind), quant_type=kind
            )
            scales = state.absmax
        count = len(rows)
        code_bytes = codes.contiguous().view(count, -1).view(torch.uint8)
        scale_bytes = scales.contiguous().view(count, -1).view(torch.uint8)
        chunks.append(torch.cat([code_bytes, scale_bytes], 1))
    return torch.cat(chunks)


def _decode(packed: Tensor, row_format: tuple[str, int], dtype: torch.dtype) -> Tensor:
    """Decode ``[rows, bytes]`` to ``[rows, width]``."""
    rows, length = packed.shape
    kind, width = row_format
    code_bytes = width if kind == "int8" else width // 2
    codes, scale_bytes = packed.split([code_bytes, length - code_bytes], 1)
    scales = scale_bytes.contiguous().view(torch.float32)  # [rows, blocks]
    if kind == "int8":
        return (codes.view(torch.int8).float() * scales).to(dtype)
    library = _library()
    state = library.QuantState(
        absmax=scales.flatten(),
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
