"""Context parallelism: each rank of the context dimension has a slice of every sequence.

With ``context_kind=ulysses`` (arXiv 2309.14509) the ranks exchange sequence slices for heads around
attention, which needs whole sequences:

    a slice of all heads on each rank ──all-to-all──▶ whole sequences of some heads ──attention──▶
    all-to-all back

With ``context_kind=ring`` heads stay whole and keys and values travel from rank to rank, so there
may be any number of ranks. The rounds, their sums and the backward pass are torch's
(``torch.distributed.tensor.experimental``). torch's own entry point replaces sdpa for the whole
process and knows CUDA alone; here its rounds get a kernel for CPU and one for CUDA. Each rank has
two slices, one from each end of the sequence, so that causal attention is as much work on each:

    rank 0: slices 0 and 3          rank 1: slices 1 and 2

Invariant: attention is computed by the same function on the same rows as on one rank, for a part of
the heads; everything else is done per token. Results for the loss tokens are summed over the
dimension: all of its ranks compute the same loss, and the sum of their gradients is the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor.experimental._context_parallel import _attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from skyasync.errors import UserError
from skyasync.models.attention import AttentionPlan, window_mask
from skyasync.models.config import ATTENDING, config_value, head_size
from skyasync.models.fsdp.sharding import Mesh
from skyasync.models.packed_blocks import NO_END
from skyasync.models.packing import Layout
from skyasync.models.token_model import can_share_prefixes

KEY = "trainer.parallel.context"
ULYSSES = "ulysses"
RING = "ring"
ATTENTION = "skyasync_ulysses"


@dataclass(frozen=True)
class Context:
    """This rank's coordinate, ``rank``, of ``size`` in the context dimension.

    ``ring``: it has two slices of the sequence dimension, one from each end; else one.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    ring: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup, kind: str = ULYSSES) -> Context:
        return cls(group, dist.get_rank(group), dist.get_world_size(group), ring=kind == RING)

    def slice(self, layout: Layout) -> Layout:
        """Take this rank's part of the sequence dimension, and the loss tokens that it predicts.

        Rows are padded to a multiple of the slices; padding comes last, where no token sees it.
        ``visible_until`` stays that of whole rows.
        """
        slices = [self.rank]  # numbers of this rank's slices, among those of all ranks
        if self.ring:
            slices = [self.rank, 2 * self.size - 1 - self.rank]
        rows, width = layout.tokens.shape
        count = self.size * len(slices)
        share = -(-width // count)  # tokens of a slice: rounded up
        padding = share * count - width

        def local_slices(values: Tensor) -> Tensor:
            """``[rows, width, ...]`` as ``[rows, slices * share, ...]``."""
            zeros = values.new_zeros(rows, padding, *values.shape[2:])
            chunks = torch.cat([values, zeros], 1).split(share, dim=1)
            return torch.cat([chunks[number] for number in slices], 1)

        positions = layout.positions
        if positions is None:
            positions = torch.arange(width, device=layout.tokens.device).expand(rows, width)
        row = layout.predictors // width  # [m]
        column = layout.predictors % width
        # By a slice's number: its place among this rank's slices, -1 for those of other ranks.
        local_number = torch.full((count,), -1, device=column.device)
        local_number[slices] = torch.arange(len(slices), device=column.device)
        number = local_number[column // share]  # [m]
        is_local = number >= 0  # [m]
        predictors = (row * len(slices) + number) * share + column % share
        layout_slice = replace(
            layout,
            tokens=local_slices(layout.tokens),
            positions=local_slices(positions),
            predictors=predictors[is_local],
            targets=layout.targets[is_local],
        )
        if layout.visible_until is not None:
            layout_slice.visible_until = F.pad(layout.visible_until, (0, padding), value=NO_END)
        if layout.experts is not None:
            layout_slice.experts = local_slices(layout.experts)
        if layout.copies is None:
            layout_slice.cells = layout.cells[is_local]
        else:
            is_local_copy = is_local[layout.copies]  # [n]
            local_index = is_local.cumsum(0) - 1  # [m]: among the local loss tokens
            layout_slice.cells = layout.cells[is_local_copy]
            layout_slice.copies = local_index[layout.copies[is_local_copy]]
        return layout_slice


def split_sequences(model: PreTrainedModel, mesh: Mesh, kind: str, dtype: torch.dtype) -> Context:
    """Prepare a model without memory for context parallelism.

    Args:
        kind: how split sequences attend, ``trainer.parallel.context_kind``.
        dtype: that the model computes in.
    """
    check(model.config, mesh.shape.context, mesh.shape.tensor, kind)
    if kind == RING:
        check_ring_device(model.config, dtype, mesh.shard.device_type)
    assert mesh.context_group is not None
    model.set_attn_implementation(RING_ATTENTION if kind == RING else ATTENTION)
    return Context.of(mesh.context_group, kind)


def check(config: PreTrainedConfig, size: int, tensor: int = 1, kind: str = ULYSSES) -> None:
    """Raise ``UserError`` for a model whose heads or layers cannot be divided so."""
    if kind == RING:
        if not can_share_prefixes(config):
            raise UserError(
                f"{RING_KEY} has no sliding windows, which {config.model_type} has: use ulysses"
            )
        return
    text = config.get_text_config()
    key = f"{KEY}={size}"
    if tensor > 1:
        key += f" times trainer.parallel.tensor={tensor}"
    heads = text.num_attention_heads
    if heads % (size * tensor):
        divisors = " or ".join(str(n) for n in range(1, heads + 1) if heads % (n * tensor) == 0)
        raise UserError(
            f"{key} does not divide the {heads} attention heads of {text.model_type}: choose {divisors}"
        )
    other_types = set(config_value(text, "layer_types", ())) - ATTENDING
    if other_types:
        raise UserError(
            f"{KEY}={size} splits sequences, and {text.model_type} has layers ({min(other_types)}) that do not "
            f"attend as it needs: set {KEY}=1"
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_plan: AttentionPlan,
    sliding_window: int | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attend instead of sdpa, for this rank's slice, with all heads.

    States are ``[rows, heads, slice, size]``, and the result is ``[rows, slice, heads, size]``.
    """
    context = attention_plan.context
    spec = attention_plan.spec
    assert context
    exchange = context.group, context.size, 1, 2  # split heads, join the sequence
    repeats_heads = key.shape[1] % context.size != 0
    if repeats_heads:  # as sdpa would, but before the exchange
        groups = query.shape[1] // key.shape[1]
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
    # [rows, heads / ranks, length, size]
    query = _Exchanged.apply(query, *exchange)
    key = _Exchanged.apply(key, *exchange)
    value = _Exchanged.apply(value, *exchange)
    length = query.shape[2]
    device = query.device
    window = 0  # a window over the whole length is none
    if sliding_window and sliding_window < length:
        window = sliding_window
    if attention_plan.flexible and (spec or (window and attention_mask is None)):
        squares = spec.mask(window) if spec else window_mask(length, window, device)
        output, _ = flex_attention_forward(module, query, key, value, squares, **options)
        return _Exchanged.apply(output, *exchange), None
    if window:
        # attention_inputs makes masks without windows.
        index = torch.arange(length, device=device)
        distance = index[:, None] - index[None, :]  # [length, length]: queries by keys
        in_window = ((distance >= 0) & (distance < window))[None, None]
        if attention_mask is None:
            attention_mask = in_window
        else:
            attention_mask = attention_mask & in_window
    options["is_causal"] = attention_mask is None
    dtype = query.dtype
    query, key, value = attention_plan.exact(query, key, value)
    sdpa_module = _OneHeadEach() if repeats_heads else module
    # [rows, length, heads / ranks, size]: the same exchange brings it back
    output, _ = sdpa_attention_forward(sdpa_module, query, key, value, attention_mask, **options)
    return _Exchanged.apply(output.to(dtype), *exchange), None


class _OneHeadEach(nn.Module):
    """The attributes that sdpa reads, of a module whose keys have been repeated already."""

    is_causal = True
    num_key_value_groups = 1


class _Exchanged(Function):
    """Splits dimension ``split`` over the ranks, and joins their parts along ``join``.

    Its gradient goes the other way.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        tensor: Tensor,
        group: dist.ProcessGroup,
        size: int,
        split: int,
        join: int,
    ) -> Tensor:
        ctx.inverse = (group, size, join, split)  # type: ignore[attr-defined]
        return _exchange(tensor, group, size, split, join)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = _exchange(gradients[0], *ctx.inverse)  # type: ignore[attr-defined]
        return gradient, None, None, None, None


def _exchange(tensor: Tensor, group: dist.ProcessGroup, size: int, split: int, join: int) -> Tensor:
    chunks = torch.stack([chunk.contiguous() for chunk in tensor.chunk(size, dim=split)])
    received_chunks = torch.empty_like(chunks)  # [ranks, ...]
    dist.all_to_all_single(received_chunks, chunks, group=group)
    return torch.cat(received_chunks.unbind(0), dim=join)


AttentionInterface.register(ATTENTION, attention)


RING_ATTENTION = "skyasync_ring"
RING_KEY = "trainer.parallel.context_kind=ring"
_ROUNDS: Any = _attention
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ON_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_BACKWARD_ON_CUDA = torch.ops.aten._scaled_dot_product_flash_attention_backward
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST = 256
_STEP = 8
_OLDEST = (8, 0)
"""Limits of CUDA's flash kernel: largest head size, its step, and the oldest compute capability
(Ampere)."""


def check_ring_device(config: PreTrainedConfig, dtype: torch.dtype, device_type: str) -> None:
    """Raise ``UserError`` if the device has no kernel for the model.

    Args:
        dtype: that the model computes in.
    """
    if device_type == "cpu":
        return
    text = config.get_text_config()
    size = head_size(text)
    problem = ""
    capability = _OLDEST
    if device_type == "cuda" and torch.cuda.is_available():  # a plan may be made on another machine
        capability = torch.cuda.get_device_capability()
    if device_type != "cuda":
        problem = f"a {device_type} device has no such kernel"
    elif capability < _OLDEST:
        problem = f"this GPU can {capability[0]}.{capability[1]}, and the kernel needs {_OLDEST[0]}.{_OLDEST[1]}"
    elif dtype not in _DTYPES:
        problem = f"on a GPU its kernel takes bfloat16, and the model is computed in {str(dtype).removeprefix('torch.')}"
    elif size > _LARGEST or size % _STEP:
        problem = f"on a GPU its kernel takes heads of up to {_LARGEST} in steps of {_STEP}, and {text.model_type}'s"
        problem += f" have {size}"
    if problem:
        raise UserError(f"{RING_KEY}: {problem}: set trainer.parallel.context_kind=ulysses")


def ring_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attend instead of sdpa, for this rank's two slices of the sequence dimension.

    States are ``[rows, heads, slices, size]``, and the result is ``[rows, slices, heads, size]``.
    """
    if attention_mask is not None or sliding_window:
        raise UserError(
            f"{RING_KEY} is for causal attention without masks and windows: use ulysses"
        )
    assert attention_plan.context
    states = attention_plan.exact(query, key, value)
    output: Tensor = _Ring.apply(*states, attention_plan.context.group, scaling).to(query.dtype)
    return output.transpose(1, 2).contiguous(), None


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: dist.ProcessGroup,
        scale: float | None,
    ) -> Tensor:
        with _load_balanced():
            out, sums = _ROUNDS._templated_ring_attention(
                group, 2, _attend, query, key, value, is_causal=True, scale=scale
            )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.options = group, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        group, scale = ctx.options
        with _load_balanced():
            results = _ROUNDS._templated_ring_attention_backward(
                group,
                2,
                _attend_backward,
                gradients[0],
                "grad_out",
                *ctx.saved_tensors,
                is_causal=True,
                scale=scale,
            )
        return (*results[:3], None, None)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Run one round: the output, and the log-sum-exp of its scores."""
    groups = query.shape[1] // key.shape[1]
    # The kernels take as many KV heads as heads of queries, and no dropout (0.0).
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    kernel = _ON_CUDA if query.device.type == "cuda" else _ON_CPU
    results: tuple[Tensor, ...] = kernel(query, key, value, 0.0, is_causal, scale=scale)
    return results[:2]


def _attend_backward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
    grad_out: Tensor,
) -> tuple[Tensor, ...]:
    """Run one round backward: gradients of queries, keys and values."""
    groups = query.shape[1] // key.shape[1]
    inputs = (
        grad_out,
        query,
        repeat_kv(key, groups),
        repeat_kv(value, groups),
        out,
        logsumexp.contiguous(),
    )
    if query.device.type == "cuda":
        lengths = query.shape[2], key.shape[2]
        seed = torch.empty(0, dtype=torch.uint64, device=query.device)  # unused without dropout
        results = _BACKWARD_ON_CUDA(
            *inputs, None, None, *lengths, 0.0, is_causal, seed, seed, scale=scale
        )
    else:
        results = _BACKWARD_ON_CPU(*inputs, 0.0, is_causal, scale=scale)
    of_query, of_key, of_value = results
    # [rows, heads, slice, size]: a KV head's gradient is the sum over the heads that share it.
    rows, kv_heads, *inner_sizes = key.shape
    shape = (rows, kv_heads, groups, *inner_sizes)
    return of_query, of_key.view(shape).sum(2), of_value.view(shape).sum(2)


@contextmanager
def _load_balanced() -> Iterator[None]:
    """Set torch's order of slices to that of ``Context``: one from each end of the sequence.

    torch's own entry point may have set another order.
    """
    previous_value = _ROUNDS._cp_options.enable_load_balance
    _ROUNDS._cp_options.enable_load_balance = True
    try:
        yield
    finally:
        _ROUNDS._cp_options.enable_load_balance = previous_value


AttentionInterface.register(RING_ATTENTION, ring_attention)
