"""Sequences split over the context axis (Ulysses, arXiv 2309.14509): each rank has a slice of every row's columns, and
around attention, which needs whole sequences, the ranks exchange slices for heads. (Or they keep their heads, and keys
travel: ``ring``.)

Invariant: attention is computed as without the axis, by the same function on the same rows, for a part of the heads;
everything else is done per token. What a rank says of its own tokens is added up over the axis, so that all of its
ranks compute the same loss, and the sum of their gradients is the gradient.

    columns of all heads on each rank ──all-to-all──▶ all columns of some heads ──attention──▶ all-to-all back

With ``context_kind=ring`` heads stay whole and keys and values travel from rank to rank, so there may be any number of
ranks. The rounds, their sums and the backward pass are torch's (``torch.distributed.tensor.experimental``), whose own
entry point replaces sdpa for the whole process and knows CUDA alone; here its rounds get a kernel for CPU and one for
CUDA.
Each rank has two pieces of the columns, one from each end, so that all ranks attend to as much:

    rank 0: columns 0 and 3          rank 1: columns 1 and 2
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
from skyasync.models.fsdp.sharding import Mesh
from skyasync.models.packing import Layout
from skyasync.models.parallel.vocabulary import sum_over_group
from skyasync.models.token_model import can_share_prefixes

KEY = "trainer.parallel.context"
ULYSSES, RING = "ulysses", "ring"
ATTENTION = "skyasync_ulysses"
ATTENDING = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Context:
    """This rank's place, ``rank``, of ``size`` on the context axis.

    ``ends``: it has two pieces of the columns, as far from the first as from the last; else one.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    ends: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup, kind: str = ULYSSES) -> Context:
        return cls(group, dist.get_rank(group), dist.get_world_size(group), ends=kind == RING)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Those of all ranks' pieces that are this rank's, in their order."""
        return (self.rank, 2 * self.size - 1 - self.rank) if self.ends else (self.rank,)

    def slice(self, layout: Layout) -> Layout:
        """This rank's columns, and the loss tokens that they predict; ``owners`` stay those of whole rows.

        Rows are padded to a multiple of the pieces; padding comes last, where no token sees it.
        """
        rows, width = layout.tokens.shape
        count = self.size * len(self.pieces)
        share = -(-width // count)
        missing = share * count - width

        def own(values: Tensor) -> Tensor:
            whole = torch.cat([values, values.new_zeros(rows, missing, *values.shape[2:])], 1)
            return torch.cat([whole[:, piece * share : (piece + 1) * share] for piece in self.pieces], 1)

        positions = layout.positions
        if positions is None:
            positions = torch.arange(width, device=layout.tokens.device).expand(rows, width)
        owners = None if layout.owners is None else F.pad(layout.owners, (0, missing), value=-1)
        row, column = layout.predictors // width, layout.predictors % width
        places = torch.full((count,), -1, device=column.device)
        places[list(self.pieces)] = torch.arange(len(self.pieces), device=column.device)
        place = places[column // share]
        here = place >= 0
        predictors = (row * len(self.pieces) + place) * share + column % share
        return replace(
            layout,
            tokens=own(layout.tokens),
            positions=own(positions),
            owners=owners,
            experts=None if layout.experts is None else own(layout.experts),
            predictors=predictors[here],
            targets=layout.targets[here],
            cells=layout.cells[here],
        )

    def joined(self, rows: Tensor) -> Tensor:
        """What every rank says of its own loss tokens, ``[rows, length]`` with zeros elsewhere, on all of them."""
        return sum_over_group(rows, self.group)


def split_sequences(model: PreTrainedModel, mesh: Mesh, kind: str, dtype: torch.dtype) -> Context:
    """Prepare a model without memory for the context axis.

    Args:
        kind: how split sequences attend, ``trainer.parallel.context_kind``.
        dtype: that the model computes in.
    """
    check(model.config, mesh.axes.context, mesh.axes.tensor, kind)
    if kind == RING:
        check_ring_device(model.config, dtype, mesh.shard.device_type)
    assert mesh.context_group is not None
    context = Context.of(mesh.context_group, kind)
    model.set_attn_implementation(RING_ATTENTION if kind == RING else ATTENTION)
    return context


def check(config: PreTrainedConfig, size: int, tensor: int = 1, kind: str = ULYSSES) -> None:
    """Raises ``UserError`` for a model whose heads or layers cannot be divided so."""
    if kind == RING:
        if not can_share_prefixes(config):
            raise UserError(f"{RING_KEY} has no sliding windows, which {config.model_type} has: use ulysses")
        return
    text, key = config.get_text_config(), KEY + f"={size}" + (f" times trainer.parallel.tensor={tensor}" * (tensor > 1))
    heads = text.num_attention_heads
    if heads % (size * tensor):
        fits = [str(n) for n in range(1, heads + 1) if heads % (n * tensor) == 0]
        raise UserError(
            f"{key} does not divide the {heads} attention heads of {text.model_type}: choose {' or '.join(fits)}"
        )
    kinds = set(getattr(text, "layer_types", None) or ()) - ATTENDING
    if kinds:
        raise UserError(
            f"{KEY}={size} splits sequences, and {text.model_type} has layers ({sorted(kinds)[0]}) that do not "
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
    """In the place of sdpa, for this rank's columns: ``[rows, heads, columns, size]`` in, ``[rows, columns, heads,
    size]`` out."""
    context, spec = attention_plan.context, attention_plan.spec
    assert context is not None
    few = key.shape[1] % context.size != 0
    if few:  # as sdpa would, but before the exchange
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    query, key, value = (_exchanged(states, context) for states in (query, key, value))
    windowed = bool(sliding_window and sliding_window < query.shape[2])
    if attention_plan.flexible and (spec or (windowed and attention_mask is None)):
        window = sliding_window if windowed and sliding_window else 0
        squares = spec.mask(window) if spec else window_mask(query.shape[2], window, query.device)
        found, _ = flex_attention_forward(module, query, key, value, squares, **options)
        return _exchanged(found, context), None
    if windowed and sliding_window:
        near = _window(query.shape[2], sliding_window, query.device)
        attention_mask = near if attention_mask is None else attention_mask & near
    stand_in = _OneHeadEach() if few else module
    options["is_causal"] = attention_mask is None
    found, _ = sdpa_attention_forward(stand_in, query, key, value, attention_mask, **options)
    return _exchanged(found, context), None


class _OneHeadEach(nn.Module):
    """What sdpa reads of a module whose keys have been repeated already."""

    is_causal = True
    num_key_value_groups = 1


def _window(length: int, window: int, device: torch.device) -> Tensor:
    """Bool ``[1, 1, length, length]``: causal, over the last ``window`` tokens."""
    place = torch.arange(length, device=device)
    back = place[:, None] - place[None, :]
    return ((back >= 0) & (back < window))[None, None]


def _exchanged(tensor: Tensor, context: Context) -> Tensor:
    """Dimension 1 is split over the ranks, their parts are joined along dimension 2."""
    whole: Tensor = _Exchanged.apply(tensor, context.group, context.size, 1, 2)
    return whole


class _Exchanged(Function):
    """Splits dimension ``split`` over the ranks, joins their parts along ``join``; the gradient is exchanged back."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, group: dist.ProcessGroup, size: int, split: int, join: int) -> Tensor:
        ctx.how = (group, size, join, split)  # type: ignore[attr-defined]
        return _exchange(tensor, group, size, split, join)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = _exchange(gradients[0], *ctx.how)  # type: ignore[attr-defined]
        return back, None, None, None, None


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
_BACK_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ON_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_BACK_ON_CUDA = torch.ops.aten._scaled_dot_product_flash_attention_backward
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST, _STEP, _OLDEST = 256, 8, (8, 0)
"""Limits of CUDA's flash kernel: largest head size, its step, and the oldest compute capability (Ampere)."""


def check_ring_device(config: PreTrainedConfig, dtype: torch.dtype, device_type: str) -> None:
    """Raises ``UserError`` for what no kernel of the device can.

    Args:
        dtype: that is computed in.
    """
    if device_type == "cpu":
        return
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    found = ""
    if device_type != "cuda":
        found = f"a {device_type} device has no such kernel"
    elif torch.cuda.is_available() and (can := torch.cuda.get_device_capability()) < _OLDEST:
        found = f"this GPU can {can[0]}.{can[1]}, and the kernel needs {_OLDEST[0]}.{_OLDEST[1]}"
    elif dtype not in _DTYPES:
        found = f"on a GPU its kernel takes bfloat16, and the model is computed in {str(dtype).removeprefix('torch.')}"
    elif size > _LARGEST or size % _STEP:
        found = f"on a GPU its kernel takes heads of up to {_LARGEST} in steps of {_STEP}, and {text.model_type}'s"
        found += f" have {size}"
    if found:
        raise UserError(f"{RING_KEY}: {found}: set trainer.parallel.context_kind=ulysses")


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
    """In the place of sdpa, for this rank's columns: ``[rows, heads, columns, size]`` in, ``[rows, columns, heads,
    size]`` out."""
    if attention_mask is not None or sliding_window:
        raise UserError(f"{RING_KEY} is for causal attention without masks and windows: use ulysses")
    assert attention_plan.context is not None
    found: Tensor = _Ring.apply(query, key, value, attention_plan.context.group, scaling)
    return found.transpose(1, 2).contiguous(), None


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
        with _both_ends():
            out, sums = _ROUNDS._templated_ring_attention(
                group, 2, _attend, query, key, value, is_causal=True, scale=scale
            )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.how = group, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        group, scale = ctx.how
        with _both_ends():
            found = _ROUNDS._templated_ring_attention_backward(
                group, 2, _attend_back, gradients[0], "grad_out", *ctx.saved_tensors, is_causal=True, scale=scale
            )
        return (*found[:3], None, None)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    """The result and the logarithms of the sums of its weights."""
    key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
    kernel = _ON_CUDA if query.device.type == "cuda" else _ON_CPU
    found: tuple[Tensor, ...] = kernel(query, key, value, 0.0, is_causal, scale=scale)
    return found[:2]


def _attend_back(
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
    """Of keys that several heads share, the sum of what these say."""
    repeated = [repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value)]
    given = grad_out, query, *repeated, out, logsumexp.contiguous()
    if query.device.type == "cuda":
        lengths = query.shape[2], key.shape[2]
        seed = torch.empty(0, dtype=torch.uint64, device=query.device)  # read where there is dropout
        found = _BACK_ON_CUDA(*given, None, None, *lengths, 0.0, is_causal, seed, seed, scale=scale)
    else:
        found = _BACK_ON_CPU(*given, 0.0, is_causal, scale=scale)
    of_query, *others = found
    return of_query, *(each.view(key.shape[0], key.shape[1], -1, *key.shape[2:]).sum(2) for each in others)


@contextmanager
def _both_ends() -> Iterator[None]:
    """Each rank has a piece from each end of the sequence; torch's own entry point may have set this otherwise."""
    before = _ROUNDS._cp_options.enable_load_balance
    _ROUNDS._cp_options.enable_load_balance = True
    try:
        yield
    finally:
        _ROUNDS._cp_options.enable_load_balance = before


AttentionInterface.register(RING_ATTENTION, ring_attention)
