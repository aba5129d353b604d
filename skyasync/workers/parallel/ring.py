"""Attention of sequences that are split over the context axis, with keys and values that travel from rank to rank.

Invariant: a query sees the keys before it and its own, in whatever rank they are; heads stay whole, so there may be any
number of ranks. The rounds, what is added up in them and the way back are torch's
(``torch.distributed.tensor.experimental``); its own entrance is for CUDA alone, so they are given a CPU's kernel here.

    rank 0: q0 on k0          rank 1: q1 on k1, then k0          (causal: the later ranks do more)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor.experimental._context_parallel import _attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from skyasync.errors import UserError

ATTENTION = "skyasync_ring"
KEY = "trainer.parallel.context_kind=ring"
_PLACE = "_skyasync_context"
_ROUNDS: Any = _attention
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """In the place of sdpa, for this rank's columns: ``[rows, heads, columns, size]`` in, ``[rows, columns, heads,
    size]`` out."""
    if attention_mask is not None or sliding_window:
        raise UserError(f"{KEY} is for causal attention without masks and windows: use ulysses")
    group: dist.ProcessGroup = getattr(module, _PLACE).group
    found: Tensor = _Ring.apply(query, key, value, group, scaling)
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
        with _in_order():
            out, sums = _ROUNDS._templated_ring_attention(
                group, 2, _attend, query, key, value, is_causal=True, scale=scale
            )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.how = group, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        group, scale = ctx.how
        with _in_order():
            found = _ROUNDS._templated_ring_attention_backward(
                group, 2, _attend_back, gradients[0], "grad_out", *ctx.saved_tensors, is_causal=True, scale=scale
            )
        return (*found[:3], None, None)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    """The result and the logarithms of the sums of its weights."""
    key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
    found: tuple[Tensor, ...] = _FORWARD(query, key, value, 0.0, is_causal, scale=scale)
    return found


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
    of_query, *others = _BACKWARD(grad_out, query, *repeated, out, logsumexp, 0.0, is_causal, scale=scale)
    return of_query, *(each.view(key.shape[0], key.shape[1], -1, *key.shape[2:]).sum(2) for each in others)


@contextmanager
def _in_order() -> Iterator[None]:
    """Each rank has one piece of the columns, not one from each end."""
    before = _ROUNDS._cp_options.enable_load_balance
    _ROUNDS._cp_options.enable_load_balance = False
    try:
        yield
    finally:
        _ROUNDS._cp_options.enable_load_balance = before


AttentionInterface.register(ATTENTION, attention)
