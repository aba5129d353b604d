"""Attention of sequences that are split over the context axis, with keys and values that travel from rank to rank.

Invariant: a query sees the keys before it and its own, in whatever rank they are; heads stay whole, so there may be any
number of ranks. The rounds, what is added up in them and the way back are torch's
(``torch.distributed.tensor.experimental``), for columns in two pieces per rank, one from each end, so that all ranks
attend to as much:

    rank 0: columns 0 and 3          rank 1: columns 1 and 2

Torch's own entrance replaces sdpa for the whole process and knows CUDA alone. Here its rounds are given a kernel each
for the CPU and for CUDA: those that say the logarithms of their weights' sums, by which rounds are put together.
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
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import repeat_kv

from skyasync.errors import UserError

ATTENTION = "skyasync_ring"
KEY = "trainer.parallel.context_kind=ring"
_PLACE = "_skyasync_context"
_ROUNDS: Any = _attention
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACK_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ON_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_BACK_ON_CUDA = torch.ops.aten._scaled_dot_product_flash_attention_backward
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST, _STEP, _OLDEST = 256, 8, (8, 0)
"""What CUDA's flash kernel takes: head sizes up to this, in such steps, on devices that can this (Ampere) or more."""


def check_device(config: PreTrainedConfig, dtype: torch.dtype, device_type: str) -> None:
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
        raise UserError(f"{KEY}: {found}: set trainer.parallel.context_kind=ulysses")


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
    """Each rank has a piece of the columns from each end; whoever uses torch's entrance may have said otherwise."""
    before = _ROUNDS._cp_options.enable_load_balance
    _ROUNDS._cp_options.enable_load_balance = True
    try:
        yield
    finally:
        _ROUNDS._cp_options.enable_load_balance = before


AttentionInterface.register(ATTENTION, attention)
