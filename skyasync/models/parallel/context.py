"""Context parallelism: each rank of the context dimension has a slice of every row's sequence
dimension.

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
        """This rank's part of the sequence dimension, and the loss tokens that it predicts;
        ``visible_until`` stays that of whole rows.

        Rows are padded to a multiple of the slices; padding comes last, where no token sees it.
        """
        # of all ranks' slices
        if self.ring:
            slices = [self.rank, 2 * self.size - 1 - self.rank]
        else:
            slices = [self.rank]
        rows, width = layout.tokens.shape
        count = self.size * len(slices)
        share = -(-width // count)
        missing = share * count - width

        def own(values: Tensor) -> Tensor:
            whole = torch.cat([values, values.new_zeros(rows, missing, *values.shape[2:])], 1)
            return torch.cat(
                [whole[:, number * share : (number + 1) * share] for number in slices], 1
            )

        positions = layout.positions
        if positions is None:
            positions = torch.arange(width, device=layout.tokens.device).expand(rows, width)
        row = layout.predictors // width
        index = layout.predictors % width
        own_number = torch.full((count,), -1, device=index.device)
        own_number[slices] = torch.arange(len(slices), device=index.device)
        number = own_number[index // share]
        here = number >= 0
        of_rows = here if layout.copies is None else here[layout.copies]
        return replace(
            layout,
            tokens=own(layout.tokens),
            positions=own(positions),
            visible_until=None
            if layout.visible_until is None
            else F.pad(layout.visible_until, (0, missing), value=NO_END),
            experts=None if layout.experts is None else own(layout.experts),
            predictors=((row * len(slices) + number) * share + index % share)[here],
            targets=layout.targets[here],
            cells=layout.cells[of_rows],
            copies=None if layout.copies is None else (here.cumsum(0) - 1)[layout.copies[of_rows]],
        )


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
    """Raises ``UserError`` for a model whose heads or layers cannot be divided so."""
    if kind == RING:
        if not can_share_prefixes(config):
            raise UserError(
                f"{RING_KEY} has no sliding windows, which {config.model_type} has: use ulysses"
            )
        return
    text = config.get_text_config()
    key = KEY + f"={size}" + (f" times trainer.parallel.tensor={tensor}" * (tensor > 1))
    heads = text.num_attention_heads
    if heads % (size * tensor):
        fits = [str(n) for n in range(1, heads + 1) if heads % (n * tensor) == 0]
        raise UserError(
            f"{key} does not divide the {heads} attention heads of {text.model_type}: choose {' or '.join(fits)}"
        )
    others = set(config_value(text, "layer_types", ())) - ATTENDING
    if others:
        raise UserError(
            f"{KEY}={size} splits sequences, and {text.model_type} has layers ({min(others)}) that do not "
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
    """Instead of sdpa, for this rank's slice: ``[rows, heads, slice, size]`` in,
    ``[rows, slice, heads, size]`` out."""
    context = attention_plan.context
    spec = attention_plan.spec
    assert context is not None
    exchange = context.group, context.size, 1, 2
    few = key.shape[1] % context.size != 0
    if few:  # as sdpa would, but before the exchange
        groups = query.shape[1] // key.shape[1]
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
    query, key, value = (_Exchanged.apply(states, *exchange) for states in (query, key, value))
    length = query.shape[2]
    device = query.device
    if sliding_window and sliding_window < length:
        window = sliding_window
    else:
        window = 0
    if attention_plan.flexible and (spec or (window and attention_mask is None)):
        if spec:
            squares = spec.mask(window)
        else:
            squares = window_mask(length, window, device)
        output, _ = flex_attention_forward(module, query, key, value, squares, **options)
        return _Exchanged.apply(output, *exchange), None
    if window:
        index = torch.arange(length, device=device)
        distance = index[:, None] - index[None, :]
        near = ((distance >= 0) & (distance < window))[None, None]
        if attention_mask is None:
            attention_mask = near
        else:
            attention_mask = attention_mask & near
    options["is_causal"] = attention_mask is None
    dtype = query.dtype
    query, key, value = attention_plan.exact(query, key, value)
    output, _ = sdpa_attention_forward(
        _OneHeadEach() if few else module, query, key, value, attention_mask, **options
    )
    return _Exchanged.apply(output.to(dtype), *exchange), None


class _OneHeadEach(nn.Module):
    """What sdpa reads of a module whose keys have been repeated already."""

    is_causal = True
    num_key_value_groups = 1


class _Exchanged(Function):
    """Splits dimension ``split`` over the ranks, joins their parts along ``join``; the gradient the
    other way."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup, size: int, split: int, join: int
    ) -> Tensor:
        ctx.inverse = (group, size, join, split)  # type: ignore[attr-defined]
        return _exchange(tensor, group, size, split, join)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        own = _exchange(gradients[0], *ctx.inverse)  # type: ignore[attr-defined]
        return own, None, None, None, None


def _exchange(tensor: Tensor, group: dist.ProcessGroup, size: int, split: int, join: int) -> Tensor:
    parts = torch.stack([part.contiguous() for part in tensor.chunk(size, dim=split)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(0), dim=join)


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
    """Raises ``UserError`` if the device has no kernel for the model.

    Args:
        dtype: that the model computes in.
    """
    if device_type == "cpu":
        return
    text = config.get_text_config()
    size = head_size(text)
    problem = ""
    if device_type != "cuda":
        problem = f"a {device_type} device has no such kernel"
    elif torch.cuda.is_available() and (can := torch.cuda.get_device_capability()) < _OLDEST:
        problem = f"this GPU can {can[0]}.{can[1]}, and the kernel needs {_OLDEST[0]}.{_OLDEST[1]}"
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
    """Instead of sdpa, for this rank's slice: ``[rows, heads, slice, size]`` in,
    ``[rows, slice, heads, size]`` out."""
    if attention_mask is not None or sliding_window:
        raise UserError(
            f"{RING_KEY} is for causal attention without masks and windows: use ulysses"
        )
    assert attention_plan.context is not None
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
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """The output and the log-sum-exp of its scores."""
    key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
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
    """Gradients of a KV head are summed over the heads that share it."""
    repeated = [repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value)]
    inputs = grad_out, query, *repeated, out, logsumexp.contiguous()
    if query.device.type == "cuda":
        lengths = query.shape[2], key.shape[2]
        seed = torch.empty(0, dtype=torch.uint64, device=query.device)  # unused without dropout
        results = _BACKWARD_ON_CUDA(
            *inputs, None, None, *lengths, 0.0, is_causal, seed, seed, scale=scale
        )
    else:
        results = _BACKWARD_ON_CPU(*inputs, 0.0, is_causal, scale=scale)
    of_query, *others = results
    return of_query, *(
        each.view(key.shape[0], key.shape[1], -1, *key.shape[2:]).sum(2) for each in others
    )


@contextmanager
def _load_balanced() -> Iterator[None]:
    """Each rank has a slice from each end of the sequence; torch's own entry point may have set
    another order."""
    before = _ROUNDS._cp_options.enable_load_balance
    _ROUNDS._cp_options.enable_load_balance = True
    try:
        yield
    finally:
        _ROUNDS._cp_options.enable_load_balance = before


AttentionInterface.register(RING_ATTENTION, ring_attention)
